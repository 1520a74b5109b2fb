"""An HTTP server for scrapers, and a small HTTP client that scrapes other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tandem.metrics.exposition import TEXT, Exposition
from tandem.net.address import host_and_port
from tandem.net.http.server import HttpServer, Listener
from tandem.net.security.credentials import shows_key
from tandem.protocol.errors import InvalidArgument, Unavailable

METRICS_PATH, DISCOVERY_PATH, TRACES_PATH = "/metrics", "/sd", "/traces"
_LEAVE_S = 1
_REPLY_BYTES_MAX = 64 << 20
_PLAIN = "text/plain; charset=utf-8"

Page = Callable[[str], Awaitable[tuple[bytes, str]]]
"""A function that renders a page: takes the caller's `Accept` header, returns the body and its content type."""


def metrics_page(exposition: Exposition) -> Page:
    """Return the page with the process's own metrics; a thread renders it, so that the event loop is not blocked."""

    async def page(accept: str) -> tuple[bytes, str]:
        return await asyncio.to_thread(exposition.render, accept or TEXT)

    return page


class MetricsServer:
    """Serves pages to callers with a valid key. Call `open` once and `close` once, on the same event loop."""

    def __init__(self, pages: Mapping[str, Page], keys: frozenset[str]) -> None:
        """Create a server of `pages`, by path; `keys` are the accepted bearer tokens, empty = no authentication."""
        self._pages = pages
        self._keys = keys
        self._server: HttpServer | None = None

    async def open(self, host: str, port: int = 0) -> str:
        """Start listening; return the address as host:port. Raises FailedPrecondition if the port is taken."""
        listener = Listener(host, port, "metrics_port")
        self._server = HttpServer(self._serve, listener)
        await self._server.begin()
        return listener.address

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.leave(_LEAVE_S)
            await server.gone()

    async def _serve(self, scope: Any, _receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        page = self._pages.get(scope["path"])
        if self._keys and not self._shows_key(scope["headers"]):
            status, body, content_type = 401, b"send 'Authorization: Bearer <metrics key>'\n", _PLAIN
        elif page is None or scope["method"] != "GET":
            known = ", ".join(self._pages)
            status, body, content_type = 404, f"GET one of {known}\n".encode(), _PLAIN
        else:
            status = 200
            body, content_type = await page(headers.get(b"accept", b"").decode("latin-1"))
        reply = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": reply})
        await send({"type": "http.response.body", "body": body})

    def _shows_key(self, headers: Any) -> bool:
        try:
            return shows_key(headers, self._keys)
        except InvalidArgument:
            return False


async def fetch(address: str, path: str, key: str = "", timeout_s: float = 2.0) -> str:
    """Fetch a page from the metrics server at `address` (host:port), and return its text.

    Raises Unavailable if there is no response within `timeout_s` seconds, or if its status is not 200.
    """
    bearer = f"Authorization: Bearer {key}\r\n" if key else ""
    try:
        async with asyncio.timeout(timeout_s):
            head, body = await _get(address, f"GET {path} HTTP/1.0\r\nAccept: {TEXT}\r\n{bearer}\r\n")
    except (OSError, TimeoutError, ValueError) as error:
        raise Unavailable(f"no metrics from {address}{path}: {type(error).__name__} {error}") from None
    status = head.split(b" ", 2)[1:2]
    if status != [b"200"]:
        said = body.decode(errors="replace").strip()[:200]
        raise Unavailable(f"no metrics from {address}{path}: {b''.join(status).decode()} {said}")
    return body.decode()


async def _get(address: str, request: str) -> tuple[bytes, bytes]:
    """Send an HTTP/1.0 request, and return header and body of the response, which ends when the connection closes."""
    reader, writer = await asyncio.open_connection(*host_and_port(address))
    try:
        writer.write(request.encode())
        reply = bytearray()
        while part := await reader.read(1 << 16):
            reply += part
            if len(reply) > _REPLY_BYTES_MAX:
                raise ValueError("the reply does not end")
    finally:
        writer.close()
    head, _, body = bytes(reply).partition(b"\r\n\r\n")
    return head, body
