"""Connections are closed when their clients stall, and their number is limited."""

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from tandem.net.http.protocol import READ_BYTES, GuardedProtocol
from tandem.net.http.server import HttpServer, Listener
from tandem.settings.listeners import ListenerLimits
from tests.unit.router.fake_cluster import until

LONG = 1000.0
PATIENT = ListenerLimits(header_timeout_s=LONG, body_timeout_s=LONG, idle_timeout_s=LONG, unread_timeout_s=LONG)
SHORT = 0.05
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


class App:
    """Reads the body, and answers once the test allows it; records the requests."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.begun = 0
        self.left = asyncio.Event()
        self.body = b"hello"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun += 1
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            pass
        if message["type"] == "http.disconnect":
            self.left.set()
            return
        await self.go.wait()
        headers = [(b"content-length", str(len(self.body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})
        if (await receive())["type"] == "http.disconnect":
            self.left.set()


@contextlib.asynccontextmanager
async def serving(app: App, limits: ListenerLimits) -> AsyncIterator[tuple[str, int]]:
    listener = Listener("127.0.0.1", 0, "http_port")
    server = HttpServer(app, listener, limits)
    await server.begin()
    try:
        yield listener.socket.getsockname()
    finally:
        app.go.set()
        server.leave(1)
        await server.gone()


async def connect(address: tuple[str, int], sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(sent)
    return reader, writer


async def answer(reader: asyncio.StreamReader) -> bytes:
    """Reads one response with a body of five bytes."""
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(5)


async def until_end(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(60):
        return await reader.read()


@pytest.mark.parametrize(
    ("setting", "sent", "said"),
    [
        ("header_timeout_s", b"", b""),
        ("header_timeout_s", b"GET / HT", b"408"),
        ("header_timeout_s", b"GET / HTTP/1.1\r\nHost: a\r\nX", b"408"),
        ("body_timeout_s", POST + b"half", b"408"),
        ("body_timeout_s", CHUNKED + b"5\r\nab", b"408"),
    ],
    ids=["silent", "half a line", "half a header", "half a body", "half a chunk"],
)
async def test_what_does_not_go_on_is_ended(setting: str, sent: bytes, said: bytes) -> None:
    """Regression: all of these connections were still open after 95 s."""
    app = App()
    async with serving(app, replace(PATIENT, **{setting: SHORT})) as address:
        reader, writer = await connect(address, sent)
        received = await until_end(reader)
        assert said in received
        assert bool(received) == bool(said)
        if setting == "body_timeout_s":
            await app.left.wait()
        writer.close()
        reader, writer = await connect(address, GET)
        assert b"200" in await answer(reader)
        writer.close()


async def test_a_header_deadline_holds_from_its_first_byte_on() -> None:
    async with serving(App(), replace(PATIENT, header_timeout_s=SHORT)) as address:
        reader, writer = await connect(address, GET)
        await answer(reader)
        await asyncio.sleep(2 * SHORT)  # between requests the longer idle timeout applies
        writer.write(GET + GET[:10])
        await answer(reader)
        assert b"408" in await until_end(reader)
        writer.close()


async def test_between_two_requests_there_is_a_deadline_too() -> None:
    async with serving(App(), replace(PATIENT, idle_timeout_s=SHORT)) as address:
        reader, writer = await connect(address, GET)
        await answer(reader)
        assert await until_end(reader) == b""
        writer.close()


async def test_an_answer_may_take_its_time() -> None:
    app = App()
    app.go.clear()
    short = ListenerLimits(header_timeout_s=SHORT, body_timeout_s=SHORT, idle_timeout_s=SHORT, unread_timeout_s=SHORT)
    async with serving(app, short) as address:
        reader, writer = await connect(address, POST + b"x" * 100)
        await asyncio.sleep(4 * SHORT)
        app.go.set()
        assert b"200" in await answer(reader)
        writer.close()


async def test_a_client_that_does_not_read_is_ended() -> None:
    app = App()
    app.body = b"x" * (64 << 20)
    async with serving(app, replace(PATIENT, unread_timeout_s=0.5)) as address:
        _reader, writer = await connect(address, GET)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await app.left.wait()
        writer.close()


async def test_the_kernel_looks_after_silent_clients() -> None:
    app = App()
    app.go.clear()
    async with serving(app, replace(PATIENT, keepalive_s=20.0)) as address:
        before = _sockets()
        _, writer = await connect(address, GET)
        await until(lambda: bool(app.begun), "it came in")
        here = writer.get_extra_info("sockname")
        (accepted,) = [descriptor for descriptor in _sockets() - before if _peer(descriptor) == here]
        with socket.socket(fileno=_dup(accepted)) as connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 20
        app.go.set()
        writer.close()


def _sockets() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def _dup(descriptor: int) -> int:
    return os.dup(descriptor)


def _peer(descriptor: int) -> Any:
    try:
        with socket.socket(fileno=_dup(descriptor)) as connection:
            return connection.getpeername()
    except OSError:
        return None


async def test_over_the_bound_the_one_goes_that_waited_longest() -> None:
    async with serving(App(), replace(PATIENT, max_connections=2)) as address:
        first, second, third = [await connect(address) for _ in range(3)]
        assert await until_end(first[0]) == b""
        for reader, writer in (second, third):
            writer.write(GET)
            assert b"200" in await answer(reader)
        for _, writer in (first, second, third):
            writer.close()


async def test_no_connection_goes_while_it_has_a_request() -> None:
    app = App()
    app.go.clear()
    async with serving(app, replace(PATIENT, max_connections=2)) as address:
        busy = [await connect(address, GET) for _ in range(2)]
        await until(lambda: app.begun == 2, "both are in progress")
        reader, writer = await connect(address)
        refused = await until_end(reader)
        assert b"503" in refused
        assert b"retry-after" in refused.lower()
        writer.close()
        app.go.set()
        for reader, writer in busy:
            assert b"200" in await answer(reader)
            writer.close()


async def test_one_large_body_is_read_per_iteration_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    iteration, reads, received = 0, Counter[int](), GuardedProtocol.data_received

    async def count_iterations() -> None:
        nonlocal iteration
        while True:
            iteration += 1
            await asyncio.sleep(0)

    def noted(self: GuardedProtocol, data: bytes) -> None:
        received(self, data)
        if self.conn.body_bytes > 2 * READ_BYTES:
            reads[iteration] += 1

    monkeypatch.setattr(GuardedProtocol, "data_received", noted)
    size = 40 * READ_BYTES
    post = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size
    counting = asyncio.create_task(count_iterations())
    async with serving(App(), PATIENT) as address:
        streams = [await connect(address, post) for _ in range(16)]
        for reader, writer in streams:
            assert (await answer(reader)).endswith(b"hello")
            writer.close()
    counting.cancel()
    assert reads.total() >= 16 * 30
    assert max(reads.values()) <= 2  # the turn itself, and one after which the application has taken a full buffer


async def test_a_body_in_single_bytes_is_refused() -> None:
    """Each chunk costs 15 µs of the event loop: 4 MiB of them a minute."""
    app = App()
    async with serving(app, PATIENT) as address:
        reader, writer = await connect(address, CHUNKED + b"1\r\na\r\n" * 5000 + b"0\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):  # the server closes with unread data
            assert b"200" not in await until_end(reader)
        await app.left.wait()
        writer.close()
        large = b"".join(b"400\r\n" + b"x" * 1024 + b"\r\n" for _ in range(2000))
        reader, writer = await connect(address, CHUNKED + large + b"0\r\n\r\n")
        assert b"200" in await answer(reader)
        writer.close()


async def test_a_header_in_the_middle_of_another_answer_breaks_nothing() -> None:
    """A pipelined request waits, and does not end its connection."""
    app = App()
    app.go.clear()
    async with serving(app, replace(PATIENT, header_timeout_s=0.2)) as address:
        reader, writer = await connect(address, GET + GET)
        await asyncio.sleep(0.4)
        app.go.set()
        for _ in range(2):
            assert b"200" in await answer(reader)
        writer.close()


async def test_a_request_of_two_lengths_is_refused_and_its_connection_ends() -> None:
    app = App()
    async with serving(app, PATIENT) as address:
        head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
        reader, writer = await connect(address, head + b"0\r\n\r\n" + GET)
        assert (await until_end(reader)).startswith(b"HTTP/1.1 400")
        writer.close()
    assert not app.begun
