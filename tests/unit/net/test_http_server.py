"""Listening sockets of HTTP servers."""

import asyncio
import socket

import pytest

from tandem.net.http.server import Listener


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_what_is_accepted_sends_each_event_at_once(host: str) -> None:
    """Accepted connections have TCP_NODELAY: no event waits for the acknowledgement of the one before."""
    delays: asyncio.Queue[int] = asyncio.Queue()

    def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        delays.put_nowait(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = Listener(host, 0, "http_port")
    server = await asyncio.start_server(accepted, sock=listener.socket)
    async with server:
        reader, writer = await asyncio.open_connection(*listener.socket.getsockname()[:2])
        assert await delays.get() == 1
        await reader.read()
        writer.close()
