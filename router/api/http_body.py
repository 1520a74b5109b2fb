"""What an HTTP client sends: its request's body, and that it leaves."""

from __future__ import annotations

from fastapi import Request
from starlette.types import Receive

from router.text.request_reader import check_size
from wire.errors import Cancelled

_DRAIN_BYTES = 64 << 20
"""A body over the limit is read this far, so that the client sees the answer instead of a broken pipe."""


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; `InvalidArgument` if it is over `limit` bytes, `Cancelled` if the client leaves."""
    parts: list[bytes] = []
    size, more = 0, True
    while more and size <= _DRAIN_BYTES:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left while it sent the request")
        part = message.get("body", b"")
        size += len(part)
        if size <= limit:
            parts.append(part)
        more = message.get("more_body", False)
    check_size(size, limit)
    return b"".join(parts)


async def disconnected(receive: Receive) -> None:
    """Returns when the client of a request whose body is read has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
