"""Frames over a socket: all of them, in order, in few messages; and all ways in which a stream can end."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import pytest
from google.protobuf.message import EncodeError

from tandem.net.frames import FrameStream
from tandem.protocol.generated.tandem.v1 import front_pb2

Router = FrameStream[front_pb2.RouterFrames, front_pb2.FrontFrames]
Front = FrameStream[front_pb2.FrontFrames, front_pb2.RouterFrames]


@dataclass
class Pair:
    """A router's stream, and the other end of its socket."""

    router: Router
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def front(self) -> Front:
        return FrameStream(self.reader, self.writer, front_pb2.FrontFrames, front_pb2.RouterFrames)

    async def read(self) -> front_pb2.RouterFrames:
        """Reads one message."""
        length = int.from_bytes(await self.reader.readexactly(4), "little")
        return front_pb2.RouterFrames.FromString(await self.reader.readexactly(length))


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    ours, theirs = socket.socketpair()
    router = FrameStream(*await asyncio.open_unix_connection(sock=ours), front_pb2.RouterFrames, front_pb2.FrontFrames)
    made = Pair(router, *await asyncio.open_unix_connection(sock=theirs))
    yield made
    for writer in (router._writer, made.writer):
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def all_of(stream: Router) -> list[front_pb2.FrontFrame]:
    """Returns all frames of a stream until its end."""
    async with asyncio.timeout(5):
        return [frame async for frame in stream.received()]


async def test_frames_arrive_as_they_were_sent_in_both_directions(pair: Pair) -> None:
    front = pair.front
    sent = [(1, bytes(300_000)), (2, b""), (1 << 63, b"last")]
    for call, data in sent:
        front.send(call, body=front_pb2.HttpBody(data=data, more=True))
        await asyncio.sleep(0)
    front.send(0, opened=front_pb2.Opened())
    pair.router.send(3, message=b"answer")
    assert [frame.message for frame in (await pair.read()).frames] == [b"answer"]
    front.close()
    *bodies, opened = await all_of(pair.router)
    assert [(frame.call, frame.body.data, frame.body.more) for frame in bodies] == [(*each, True) for each in sent]
    assert (opened.call, opened.WhichOneof("what")) == (0, "opened")


async def test_what_is_sent_in_one_turn_of_the_loop_is_one_message(pair: Pair) -> None:
    for call in range(100):
        pair.router.send(call, message=b"a")
    await asyncio.sleep(0)
    pair.router.send(100, message=b"b")
    assert [frame.call for frame in (await pair.read()).frames] == list(range(100))
    assert [frame.call for frame in (await pair.read()).frames] == [100]


async def test_an_end_sends_what_is_left_and_nothing_behind_it(pair: Pair) -> None:
    pair.router.send(1, message=b"last")
    pair.router.close()
    pair.router.send(2, message=b"too late")
    pair.router.close()
    assert [frame.call for frame in (await pair.read()).frames] == [1]
    assert await pair.reader.read() == b""


@pytest.mark.parametrize("cut", [0, 2, 4, 7])
async def test_an_end_in_the_middle_of_a_message_ends_the_stream(pair: Pair, cut: int) -> None:
    whole = front_pb2.FrontFrames(frames=[front_pb2.FrontFrame(call=1, http=front_pb2.HttpRequest(method="GET"))])
    data = whole.SerializeToString()
    message = len(data).to_bytes(4, "little") + data
    pair.writer.write(message + message[:cut])
    pair.writer.close()
    assert [frame.http.method for frame in await all_of(pair.router)] == ["GET"]


async def test_the_other_end_s_death_ends_the_stream(pair: Pair) -> None:
    pair.router.send(1, message=b"never read")
    await asyncio.sleep(0)
    pair.writer.transport.abort()  # a socket closed with unread bytes: this end sees a reset
    assert await all_of(pair.router) == []
    for _ in range(10):
        pair.router.send(1, message=b"lost")
        await asyncio.sleep(0)


async def test_garbage_ends_the_stream_in_words(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.writer.write((3).to_bytes(4, "little") + b"\xff\xff\xff")
    assert await all_of(pair.router) == []
    assert "invalid message on a stream" in caplog.text


async def test_a_slow_reader_loses_nothing(pair: Pair) -> None:
    """Regression: 256 MiB for one client ended the stream for all."""
    count = 300
    for _ in range(count):
        pair.router.send(1, message=bytes(1 << 20))
        await asyncio.sleep(0)
    read = 0
    async with asyncio.timeout(30):
        while read < count:
            read += len((await pair.read()).frames)


async def test_who_sends_in_turn_waits_for_a_reader(pair: Pair) -> None:
    await pair.router.send_in_turn(1, message=bytes(4 << 20))
    waiting = [asyncio.create_task(pair.router.send_in_turn(call, message=b"a")) for call in (2, 3)]
    pair.router.send(4, message=b"at once")
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting)
    async with asyncio.timeout(5):
        assert [frame.call for _ in range(4) for frame in (await pair.read()).frames] == [1, 4, 2, 3]
        await asyncio.gather(*waiting)


async def test_nobody_waits_for_a_reader_that_is_gone(pair: Pair) -> None:
    await pair.router.send_in_turn(1, message=bytes(4 << 20))
    waiting = asyncio.create_task(pair.router.send_in_turn(1, message=b"a"))
    await asyncio.sleep(0.05)
    pair.writer.transport.abort()
    async with asyncio.timeout(5):
        await waiting
        await pair.router.send_in_turn(1, message=b"a")


class Picky:
    """A message that cannot be serialized if one of its frames is marked as broken."""

    def __init__(self, frames: Iterable[front_pb2.RouterFrame] = ()) -> None:
        self._whole = front_pb2.RouterFrames(frames=frames)
        self.frames = self._whole.frames

    def SerializeToString(self) -> bytes:
        if any(frame.message == b"broken" for frame in self.frames):
            raise EncodeError("too large")
        return self._whole.SerializeToString()


async def test_a_frame_that_cannot_be_sent_fails_its_call_alone(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: all frames of that turn of the event loop were lost without an error."""
    failed: list[int] = []
    pair.router._outgoing = Picky  # type: ignore[assignment]
    pair.router._batch = Picky()
    pair.router.on_failed = failed.append
    for call in range(6):
        pair.router.send(call, message=b"broken" if call in (2, 4) else b"whole")
    async with asyncio.timeout(5):
        assert [frame.call for _ in range(4) for frame in (await pair.read()).frames] == [0, 1, 3, 5]
    assert failed == [2, 4]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert caplog.records[0].exc_info
    pair.router.send(7, message=b"whole")
    assert [frame.call for frame in (await pair.read()).frames] == [7]
