"""Headers of HTTP and metadata of gRPC as frames have them."""

from collections.abc import Iterable

from wire.generated.tandem.v1 import front_pb2


def packed(pairs: Iterable[tuple[str | bytes, str | bytes]]) -> list[front_pb2.Header]:
    """Names and values, as text or as bytes."""
    return [front_pb2.Header(name=_bytes(name), value=_bytes(value)) for name, value in pairs]


def unpacked(headers: Iterable[front_pb2.Header]) -> list[tuple[bytes, bytes]]:
    """The same as bytes."""
    return [(each.name, each.value) for each in headers]


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
