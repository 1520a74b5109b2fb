"""Calls between a front process and its router, without processes: flow control, and the end of calls."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from starlette.types import Message, Receive, Scope, Send

from router.front.calls import FrontCalls
from router.front.grpc_calls import CallContext, GrpcCall, methods_of
from router.front.http_calls import HttpCall
from router.front.link import MESSAGES_BYTES_MAX, Call, RouterLink
from router.front.relay import HttpRelay, _feed, _send
from router.front.window import ACK_EVERY, AHEAD_BYTES_MAX, AHEAD_MAX, PART_BYTES_MAX
from tandem.protocol.errors import Cancelled, Internal, ResourceExhausted
from tandem.protocol.generated.tandem.v1 import front_pb2, inference_pb2
from tests.unit.router.fake_cluster import until

MESSAGES = 1000
LARGE = 4 << 20


class Source:
    """A servicer and an application that answer with many messages."""

    made = 0
    read = 0
    """The number of bytes of the request that were read."""

    Chat = Tokenize = Detokenize = GetTokenizerInfo = GetModelInfo = GetServerInfo = GetLoads = None
    LoadAdapter = UnloadAdapter = None

    async def Abort(self, request: bytes, _context: CallContext) -> inference_pb2.AbortResponse:
        self.read = len(inference_pb2.AbortRequest.FromString(request).request_id)
        return inference_pb2.AbortResponse(found=True)

    async def Generate(self, _request: Any, context: CallContext) -> None:
        left: list[bool] = []
        context.add_done_callback(lambda _: left.append(True))
        while self.made < MESSAGES and not left:
            self.made += 1
            await context.write(inference_pb2.GenerateResponse())

    async def app(self, _scope: Scope, receive: Receive, send: Send) -> None:
        left = asyncio.create_task(receive())  # type: ignore[arg-type,var-annotated]  # really a coroutine
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while self.made < MESSAGES and not left.done():
            self.made += 1
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        left.cancel()


class Silent:
    """The stream of a front process that sends nothing."""


class Wire:
    """A call of a front process, with its router side, without a socket."""

    def __init__(self, kind: str) -> None:
        self.source = Source()
        self.parts: list[front_pb2.FrontFrame] = []
        """The frames that were sent to the router."""
        self.front = Call(1, self, lambda _: None)  # type: ignore[arg-type]
        self.router: GrpcCall | HttpCall
        if kind == "grpc":
            asked = front_pb2.GrpcCall(method="Generate")
            self.router = GrpcCall(asked, methods_of(self.source), self.to_front)
        else:
            self.router = HttpCall(front_pb2.HttpRequest(method="GET"), self.source.app, self.to_front)

    def to_front(self, **what: Any) -> None:
        self.front.take(front_pb2.RouterFrame(call=1, **what))

    async def send_in_turn(self, number: int, **what: Any) -> None:
        self.send(number, **what)

    def send(self, _number: int, **what: Any) -> None:
        """Sends a frame to the router."""
        frame = front_pb2.FrontFrame(call=1, **what)
        self.parts.append(frame)
        if frame.HasField("grpc"):
            self.router = GrpcCall(frame.grpc, methods_of(self.source), self.to_front)
        elif frame.HasField("gone"):
            self.router.leave()
        else:
            self.router.on_frame(frame)


@pytest.mark.parametrize("kind", ["grpc", "http"])
async def test_what_a_client_does_not_take_waits_at_its_source(kind: str) -> None:
    """Regression: all messages were buffered in the front process."""
    wire = Wire(kind)
    answering = asyncio.create_task(wire.router.run())
    await until(lambda: wire.source.made >= AHEAD_MAX - 1, "it answers")
    for taken in (0, 2 * ACK_EVERY, 5 * ACK_EVERY):
        for _ in range(taken):
            await wire.front.next()
        await asyncio.sleep(0.01)
        assert len(wire.front._frames) <= AHEAD_MAX + ACK_EVERY
    count = 7 * ACK_EVERY
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


@pytest.mark.parametrize("part", [1, 1000, LARGE])
async def test_a_body_comes_as_fast_as_its_handler_reads(part: int) -> None:
    """Regression: the whole body was buffered in the router, whatever its size."""
    wire = Wire("http")
    count = LARGE // part if part > 1 else 1000
    left = iter(range(count))

    async def receive() -> Message:
        number = next(left, -1)
        if number < 0:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bytes(part), "more_body": number < count - 1}

    feeding = asyncio.create_task(_feed(wire.front, receive))
    await asyncio.sleep(0.05)
    assert isinstance(wire.router, HttpCall)
    assert wire.router._messages.qsize() <= AHEAD_MAX
    assert sum(len(frame.body.data) for frame in wire.parts) <= AHEAD_BYTES_MAX + PART_BYTES_MAX
    size, more = 0, True
    async with asyncio.timeout(10):
        while more:
            message = await wire.router._receive()
            size, more = size + len(message["body"]), message["more_body"]
    assert size == part * count
    feeding.cancel()


async def test_a_body_that_nobody_reads_keeps_nobody_waiting() -> None:
    """The application rejects the request without reading its body."""
    wire = Wire("http")
    sending = asyncio.create_task(wire.front.send_body(bytes(LARGE), more=False))
    await asyncio.sleep(0.01)
    assert not sending.done()
    wire.to_front(body=front_pb2.HttpBody(data=b"no"))
    async with asyncio.timeout(10):
        await sending


async def test_a_large_answer_comes_as_fast_as_its_client_reads() -> None:
    """Regression: an answer was sent as one frame, whatever its size."""
    wire = Wire("http")

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(LARGE)})

    wire.router = HttpCall(front_pb2.HttpRequest(method="GET"), app, wire.to_front)
    answering = asyncio.create_task(wire.router.run())
    await asyncio.sleep(0.01)
    assert sum(len(frame.body.data) for frame in wire.front._frames) <= AHEAD_BYTES_MAX + PART_BYTES_MAX
    size, more = 0, True
    async with asyncio.timeout(10):
        while more:
            frame = await wire.front.next()
            size, more = size + len(frame.body.data), frame.HasField("response") or frame.body.more
        await answering
    assert size == LARGE


@pytest.mark.parametrize("size", [0, 10, PART_BYTES_MAX, PART_BYTES_MAX + 1, LARGE])
async def test_a_grpc_message_comes_in_parts(size: int) -> None:
    wire = Wire("grpc")
    message = inference_pb2.AbortRequest(request_id="a" * size).SerializeToString()
    sending = asyncio.create_task(_send(wire.front, "Abort", [], message, ""))
    await until(lambda: wire.parts, "it begins")
    async with asyncio.timeout(10):
        await wire.router.run()
        await sending
        assert inference_pb2.AbortResponse.FromString((await wire.front.next()).message).found
        assert (await wire.front.next()).end.status == 0
    assert wire.source.read == size
    assert max(len(frame.body.data) + len(frame.grpc.message) for frame in wire.parts) <= PART_BYTES_MAX


async def test_a_client_that_leaves_within_its_message_ends_its_call() -> None:
    wire = Wire("grpc")
    wire.router = GrpcCall(front_pb2.GrpcCall(method="Abort", more=True), methods_of(wire.source), wire.to_front)
    answering = asyncio.create_task(wire.router.run())
    await asyncio.sleep(0)
    wire.front.close()
    async with asyncio.timeout(10):
        await answering


def link() -> tuple[RouterLink, Any]:
    """The link of a front process, over a stream that discards everything."""
    stream: Any = Wire("http")
    return RouterLink(stream), stream


def test_large_messages_are_refused_beyond_what_waits_already_and_small_ones_are_not() -> None:
    made, _ = link()
    with contextlib.ExitStack() as held:
        for _ in range(MESSAGES_BYTES_MAX // LARGE):
            held.enter_context(made.holding(LARGE))
        with pytest.raises(ResourceExhausted, match="try again later") as refused, made.holding(LARGE):
            pass
        assert refused.value.retry_after_s > 0
        for _ in range(1000):
            held.enter_context(made.holding(PART_BYTES_MAX))
    with made.holding(LARGE):
        pass


async def test_a_request_that_cannot_be_sent_fails_alone() -> None:
    made, stream = link()
    lost, other = made.call(), made.call()
    stream.on_failed(1)
    with pytest.raises(Internal, match="could not be sent"):
        await lost.next()
    other.take(front_pb2.RouterFrame(call=2, end=front_pb2.CallEnd()))
    assert (await other.next()).HasField("end")


async def test_an_answer_that_cannot_be_sent_fails_alone() -> None:
    """Regression: its client waited forever."""
    sent: list[tuple[int, Any]] = []

    class Stream:
        def send(self, number: int, **what: Any) -> None:
            sent.append((number, what))

        async def received(self) -> AsyncIterator[front_pb2.FrontFrame]:
            for number in (1, 2):
                yield front_pb2.FrontFrame(call=number, grpc=front_pb2.GrpcCall(method="Generate"))
            await asyncio.sleep(0.01)
            stream.on_failed(1)
            await asyncio.sleep(0.01)

    stream: Any = Stream()
    servicer: Any = Source()
    calls = FrontCalls(stream, servicer, servicer.app)
    async with asyncio.timeout(10):
        await calls.run(lambda: None, lambda _: None)
    ends = {number: what["end"] for number, what in sent if "end" in what}
    assert list(ends) == [1]
    assert (ends[1].status, "could not be sent" in ends[1].details) == (grpc.StatusCode.INTERNAL.value[0], True)


@pytest.mark.parametrize(
    ("path", "member"), [("/v1/messages", '"type":"overloaded_error"'), ("/v1/completions", '"code":"unavailable"')]
)
async def test_errors_of_a_front_process_have_the_form_of_the_path(path: str, member: str) -> None:
    link: Any = RouterLink(Silent())  # type: ignore[arg-type]
    link._lost = True
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await HttpRelay(link)({"type": "http", "path": path}, None, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 503
    assert member in sent[1]["body"].decode()


@pytest.mark.parametrize("defect", ["method", "callback"])
async def test_a_defect_ends_its_call_in_words(defect: str, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the call was never ended, so its client waited forever."""

    async def broken(_message: bytes, context: CallContext) -> None:
        if defect == "method":
            raise RuntimeError("defect")
        context.add_done_callback(lambda _: 1 // 0)

    wire = Wire("grpc")
    wire.router = GrpcCall(front_pb2.GrpcCall(method="Broken"), {"Broken": broken}, wire.to_front)
    await wire.router.run()
    async with asyncio.timeout(10):
        end = (await wire.front.next()).end
    wanted = (13, "unexpected RuntimeError; the server's log has the details") if defect == "method" else (0, "")
    assert (end.status, end.details) == wanted
    assert [bool(record.exc_info) for record in caplog.records] == [True]


async def test_who_waits_for_a_call_s_frames_hears_of_its_end() -> None:
    wire = Wire("http")
    waiting = asyncio.create_task(wire.front.next())
    await asyncio.sleep(0)
    wire.front.close()
    async with asyncio.timeout(10):
        with pytest.raises(Cancelled):
            await waiting
