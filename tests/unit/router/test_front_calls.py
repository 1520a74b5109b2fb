"""Calls between a front process and its router, without processes: how far an answer runs ahead of its client."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from router.front.grpc_calls import CallContext, GrpcCall, methods_of
from router.front.http_calls import HttpCall
from router.front.link import Call
from router.front.relay import _feed
from router.front.window import AHEAD_MAX, TOLD_EVERY
from tests.unit.router.fake_cluster import until
from wire.errors import Cancelled
from wire.generated.tandem.v1 import front_pb2, inference_pb2, inference_pb2_grpc

MESSAGES = 1000


class Source(inference_pb2_grpc.InferenceServicer):
    """A servicer and an application that answer with many messages."""

    made = 0

    async def Generate(self, _request: Any, context: CallContext) -> AsyncIterator[inference_pb2.GenerateResponse]:
        left: list[bool] = []
        context.add_done_callback(lambda _: left.append(True))
        while self.made < MESSAGES and not left:
            self.made += 1
            yield inference_pb2.GenerateResponse()

    async def app(self, _scope: Scope, receive: Receive, send: Send) -> None:
        left = asyncio.create_task(receive())  # type: ignore[arg-type,var-annotated]  # a coroutine in truth
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while self.made < MESSAGES and not left.done():
            self.made += 1
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        left.cancel()


class Wire:
    """A front process's call, and what the router sends it, without a socket."""

    def __init__(self, kind: str) -> None:
        self.source = Source()
        self.has_room = asyncio.Event()
        self.front = Call(1, self, lambda _: None)  # type: ignore[arg-type]
        self.router: GrpcCall | HttpCall
        if kind == "grpc":
            asked = front_pb2.GrpcCall(method="Generate")
            self.router = GrpcCall(asked, methods_of(self.source), self.to_front)
        else:
            self.router = HttpCall(front_pb2.HttpRequest(method="GET"), self.source.app, self.to_front)

    def to_front(self, **what: Any) -> None:
        self.front.take(front_pb2.RouterFrame(call=1, **what))

    async def room(self) -> None:
        await self.has_room.wait()

    def send(self, _number: int, **what: Any) -> None:
        """To the router."""
        frame = front_pb2.FrontFrame(call=1, **what)
        if frame.HasField("gone"):
            self.router.leave()
        else:
            self.router.hear(frame)


@pytest.mark.parametrize("kind", ["grpc", "http"])
async def test_what_a_client_does_not_take_waits_at_its_source(kind: str) -> None:
    """All of it was in the front process, message by message."""
    wire = Wire(kind)
    answering = asyncio.create_task(wire.router.run())
    await until(lambda: wire.source.made >= AHEAD_MAX - 1, "it answers")
    for taken in (0, 2 * TOLD_EVERY, 5 * TOLD_EVERY):
        for _ in range(taken):
            await wire.front.next()
        await asyncio.sleep(0.01)
        assert len(wire.front._frames) <= AHEAD_MAX + TOLD_EVERY
    count = 7 * TOLD_EVERY
    async with asyncio.timeout(10):
        while not answering.done() or wire.front._frames:
            await wire.front.next()
            count += 1
    assert wire.source.made == MESSAGES
    assert count == MESSAGES + (1 if kind == "grpc" else 2)


@pytest.mark.parametrize("kind", ["grpc", "http"])
async def test_a_client_that_takes_nothing_and_leaves_ends_its_call(kind: str) -> None:
    wire = Wire(kind)
    answering = asyncio.create_task(wire.router.run())
    await until(lambda: len(wire.front._frames) >= AHEAD_MAX, "it answers")
    wire.front.close()
    wire.front.close()
    async with asyncio.timeout(10):
        await answering
    assert wire.source.made < MESSAGES


async def test_a_body_comes_as_fast_as_the_router_reads() -> None:
    """Clients that sent faster than that filled the stream, which ended it for all clients of the process."""
    wire = Wire("http")
    parts = iter(range(10))

    async def receive() -> Message:
        number = next(parts)
        return {"type": "http.request" if number < 9 else "http.disconnect", "body": b"a", "more_body": True}

    feeding = asyncio.create_task(_feed(wire.front, receive))
    await asyncio.sleep(0.01)
    assert next(parts) == 1
    wire.has_room.set()
    async with asyncio.timeout(10):
        await feeding


async def test_who_waits_for_a_call_s_frames_hears_of_its_end() -> None:
    wire = Wire("http")
    waiting = asyncio.create_task(wire.front.next())
    await asyncio.sleep(0)
    wire.front.close()
    async with asyncio.timeout(10):
        with pytest.raises(Cancelled):
            await waiting
