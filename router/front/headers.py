"""Converts HTTP headers and gRPC metadata to and from frames."""

from collections.abc import Iterable

from tandem.protocol.generated.tandem.v1 import front_pb2


def packed(pairs: Iterable[tuple[str | bytes, str | bytes]]) -> list[front_pb2.Header]:
    """Return the frame headers for names and values, which may be text or bytes."""
    return [front_pb2.Header(name=_bytes(name), value=_bytes(value)) for name, value in pairs]


def unpacked(headers: Iterable[front_pb2.Header]) -> list[tuple[bytes, bytes]]:
    """Return the names and values of frame headers as bytes."""
    return [(each.name, each.value) for each in headers]


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
