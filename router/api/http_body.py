"""Reads the body of an HTTP request and detects that its client has left."""

from __future__ import annotations

from fastapi import Request
from starlette.types import Receive

from router.text.request_reader import check_size
from tandem.protocol.errors import Cancelled

_DRAIN_BYTES = 64 << 20
"""A body over the limit is read up to this size, so that the client gets the error instead of a broken pipe."""


async def read_body(request: Request, limit: int) -> bytes:
    """Return the whole body; raises InvalidArgument if it exceeds `limit` bytes, Cancelled if the client leaves.

    Nothing is kept of a body over the limit, and one that says that it is longer than `_DRAIN_BYTES` is not read.
    """
    declared = int(request.headers.get("content-length", 0))
    if declared > _DRAIN_BYTES:
        check_size(declared, limit)
    parts: list[bytes] = []
    size, more = 0, True
    while more and size <= _DRAIN_BYTES:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left while it sent the request")
        part = message.get("body", b"")
        size += len(part)
        if max(size, declared) <= limit:
            parts.append(part)
        else:
            parts.clear()
        more = message.get("more_body", False)
    check_size(size, limit)
    return b"".join(parts)


async def disconnected(receive: Receive) -> None:
    """Return when the client has left; the request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
