"""The router's end of a front process: its clients' calls, made here, and what they are answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message_factory import GetMessageClass
from starlette.types import ASGIApp, Message, Scope

from wire.errors import Internal
from wire.frames import FrameStream
from wire.generated.tandem.v1 import front_pb2, inference_pb2, inference_pb2_grpc
from wire.rpc import guarded_stream, guarded_unary

log = logging.getLogger(__name__)

RouterStream = FrameStream[front_pb2.RouterFrames, front_pb2.FrontFrames]
_Send = Callable[..., None]


class FrontCalls:
    """All calls of one front process. Belongs to the event loop."""

    def __init__(self, stream: RouterStream, inference: inference_pb2_grpc.InferenceServicer, app: ASGIApp) -> None:
        """`inference` and `app` answer as they answer clients of this process's own doors."""
        self._stream = stream
        self._methods = _methods_of(inference)
        self._app = app
        self._running: dict[int, _Running] = {}

    async def run(self, on_opened: Callable[[], None]) -> None:
        """Until the process is gone; what its clients still wait for is cancelled. `on_opened`: its doors are open."""
        async for frame in self._stream.received():
            if frame.HasField("grpc"):
                self._begin(frame.call, GrpcCall(frame.grpc, self._methods, self._send_for(frame.call)))
            elif frame.HasField("http"):
                self._begin(frame.call, HttpCall(frame.http, self._app, self._send_for(frame.call)))
            elif frame.HasField("opened"):
                on_opened()
            elif frame.call in self._running:
                self._running[frame.call].hear(frame)
        for running in list(self._running.values()):
            running.leave()

    def set_serving(self, serving: bool) -> None:
        """For the health service of that process."""
        self._stream.send(0, serving=serving)

    def leave(self, grace_s: float) -> None:
        """Take no more calls there, and end."""
        self._stream.send(0, leave_s=grace_s)

    def _begin(self, number: int, call: GrpcCall | HttpCall) -> None:
        self._running[number] = _Running(call, lambda: self._running.pop(number, None))

    def _send_for(self, number: int) -> _Send:
        def send(**what: Any) -> None:
            if number in self._running:  # a client that has left hears nothing
                self._stream.send(number, **what)

        return send


class _Running:
    """A call and its task."""

    def __init__(self, call: GrpcCall | HttpCall, forget: Callable[[], object]) -> None:
        self._call = call
        self._task = asyncio.create_task(call.run())
        self._forget = forget
        self._task.add_done_callback(lambda _: forget())

    def hear(self, frame: front_pb2.FrontFrame) -> None:
        if frame.HasField("gone"):
            self.leave()
        else:
            self._call.hear(frame)

    def leave(self) -> None:
        self._forget()
        self._call.leave()


class GrpcCall:
    """One call of `tandem.v1.Inference`."""

    def __init__(self, asked: front_pb2.GrpcCall, methods: dict[str, _Method], send: _Send) -> None:
        self._asked = asked
        self._methods = methods
        self._send = send
        self._context = CallContext(tuple((each.name.decode(), _text(each.value)) for each in asked.metadata))

    async def run(self) -> None:
        """Answer it, and say how that ended."""
        context = self._context
        try:
            method = self._methods.get(self._asked.method)
            if method is None:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            await method(self._asked.message, context, self._send)
        except grpc.aio.AbortError:
            pass
        finally:
            context.over()
        self._send(end=context.end)

    def hear(self, frame: front_pb2.FrontFrame) -> None:
        """Nothing follows the message."""

    def leave(self) -> None:
        """The client is gone: whoever answers hears of it, as from gRPC."""
        self._context.over()


_Method = Callable[[bytes, "CallContext", _Send], Awaitable[None]]


class CallContext:
    """What handlers use of gRPC's `ServicerContext`."""

    def __init__(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        self.end = front_pb2.CallEnd()
        """How the call ended."""
        self._metadata = metadata
        self._callbacks: list[Callable[[Any], None]] = []
        self._over = False

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """See gRPC."""
        return self._metadata

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """See gRPC: called once the call is over, whoever ended it."""
        if self._over:
            callback(self)
        else:
            self._callbacks.append(callback)

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        """See gRPC."""
        self.end.trailing_metadata.extend(
            front_pb2.Header(name=name.encode(), value=value.encode()) for name, value in metadata
        )

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """See gRPC."""
        self.end.status, self.end.details = code.value[0], details
        raise grpc.aio.AbortError

    def over(self) -> None:
        """The call is."""
        self._over = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class HttpCall:
    """One HTTP request."""

    def __init__(self, asked: front_pb2.HttpRequest, app: ASGIApp, send: _Send) -> None:
        self._asked = asked
        self._app = app
        self._send = send
        self._heard: asyncio.Queue[Message] = asyncio.Queue()
        self._whole = False

    async def run(self) -> None:
        """Answer it; cut the answer off if that fails in its middle."""
        try:
            await self._app(_scope(self._asked), self._heard.get, self._take)
        except Exception as error:
            log.error("unexpected failure in a handler", exc_info=error)
        if not self._whole:
            self._send(end=front_pb2.CallEnd(details=Internal("the answer could not be finished").message))

    def hear(self, frame: front_pb2.FrontFrame) -> None:
        """A part of the request's body."""
        self._heard.put_nowait({"type": "http.request", "body": frame.body.data, "more_body": frame.body.more})

    def leave(self) -> None:
        """The client is gone: whoever answers hears of it, as from an ASGI server."""
        self._heard.put_nowait({"type": "http.disconnect"})

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [front_pb2.Header(name=name, value=value) for name, value in message.get("headers", ())]
            self._send(response=front_pb2.HttpResponse(status=message["status"], headers=headers))
        elif message["type"] == "http.response.body":
            more = message.get("more_body", False)
            self._whole = not more
            self._send(body=front_pb2.HttpBody(data=message.get("body", b""), more=more))


def _methods_of(servicer: inference_pb2_grpc.InferenceServicer) -> dict[str, _Method]:
    service = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    return {
        each.name: _streaming(GetMessageClass(each.input_type), getattr(servicer, each.name))
        if each.server_streaming
        else _unary(GetMessageClass(each.input_type), getattr(servicer, each.name))
        for each in service.methods
    }


def _streaming(request: Any, handler: Any) -> _Method:
    guarded = guarded_stream(lambda message, context: handler(request.FromString(message), context))

    async def answer(message: bytes, context: Any, send: _Send) -> None:
        async for response in guarded(message, context):
            send(message=response.SerializeToString())

    return answer


def _unary(request: Any, handler: Any) -> _Method:
    async def read(message: bytes, context: Any) -> Any:
        return await handler(request.FromString(message), context)

    guarded = guarded_unary(read)

    async def answer(message: bytes, context: Any, send: _Send) -> None:
        response = await guarded(message, context)
        send(message=response.SerializeToString())

    return answer


def _scope(asked: front_pb2.HttpRequest) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": asked.http_version,
        "method": asked.method,
        "scheme": asked.scheme,
        "path": asked.path,
        "raw_path": asked.raw_path,
        "query_string": asked.query_string,
        "root_path": "",
        "headers": [(each.name, each.value) for each in asked.headers],
        "client": None,
        "server": None,
    }


def _text(value: bytes) -> str | bytes:
    """Metadata are text, but for those whose names end in -bin."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value
