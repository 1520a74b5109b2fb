"""One gRPC call from a front process, served by the router's servicer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import Message

from router.front.headers import packed, unpacked
from router.front.window import Acknowledger, Window
from tandem.net.rpc import guarded_unary
from tandem.protocol.errors import Cancelled, Internal
from tandem.protocol.generated.tandem.v1 import front_pb2, inference_pb2

log = logging.getLogger(__name__)

_Send = Callable[..., None]
Method = Callable[[bytes, "CallContext"], Awaitable[None]]


class GrpcCall:
    """One call of `tandem.v1.Inference` from a front process."""

    def __init__(self, asked: front_pb2.GrpcCall, methods: dict[str, Method], send: _Send) -> None:
        self._asked = asked
        self._methods = methods
        self._send = send
        self._window = Window()
        self._read = Acknowledger(lambda count: send(passed=count))
        self._parts: asyncio.Queue[front_pb2.HttpBody | None] = asyncio.Queue()
        """The parts of the message after the first one; None = the client has left."""
        metadata = [(name.decode(), _text(value)) for name, value in unpacked(asked.metadata)]
        self._context = CallContext(metadata, asked.peer, self._pass)

    async def run(self) -> None:
        """Serve the call, and send its status at the end."""
        context = self._context
        try:
            method = self._methods.get(self._asked.method)
            if method is None:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            await method(await self._message(), context)
        except (grpc.aio.AbortError, Cancelled):
            pass
        except Exception as error:
            log.error("unexpected failure in a call of %s", self._asked.method[:100], exc_info=error)
            internal = Internal(f"unexpected {type(error).__name__}; the server's log has the details")
            context.end.status, context.end.details = internal.grpc_status.value[0], internal.message
        finally:
            context.over()
            self._send(end=context.end)

    def on_frame(self, frame: front_pb2.FrontFrame) -> None:
        """Process a frame: a part of the message, or the client's progress in reading the answer."""
        if frame.HasField("passed"):
            self._window.passed(frame.passed)
        else:
            self._parts.put_nowait(frame.body)

    def leave(self) -> None:
        """Run the callbacks of a client that has left, as gRPC would."""
        self._window.lift()
        self._parts.put_nowait(None)
        self._context.over()

    async def _message(self) -> bytes:
        """Return the whole message; raises Cancelled if the client leaves before its end."""
        read, more = [self._asked.message], self._asked.more
        while more:
            part = await self._parts.get()
            if part is None:
                raise Cancelled("the client left while it sent the request")
            read.append(part.data)
            self._read.add(len(part.data))
            more = part.more
        return b"".join(read)

    async def _pass(self, response: Message) -> None:
        message = response.SerializeToString()
        self._send(message=message)
        await self._window.sent(len(message))


class CallContext:
    """The part of gRPC's `ServicerContext` that handlers use."""

    def __init__(
        self, metadata: Sequence[tuple[str, str | bytes]], peer: str, write: Callable[[Message], Awaitable[None]]
    ) -> None:
        self._peer = peer
        self.write = write
        """Sends a response; returns when the next may be sent."""
        self.end = front_pb2.CallEnd()
        """The status of the call."""
        self._metadata = metadata
        self._callbacks: list[Callable[[Any], None]] = []
        self._over = False

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """Return the call's metadata."""
        return self._metadata

    def peer(self) -> str:
        """Return gRPC's name of the client's address."""
        return self._peer

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` once the call is over, whichever side ended it."""
        if self._over:
            callback(self)
        else:
            self._callbacks.append(callback)

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        """Set the metadata that is sent with the status."""
        self.end.trailing_metadata.extend(packed(metadata))

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End the call with a status; always raises AbortError."""
        self.end.status, self.end.details = code.value[0], details
        raise grpc.aio.AbortError

    def over(self) -> None:
        """Mark the call as over and run its callbacks."""
        self._over = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception as error:
                log.error("a callback at the end of a call failed", exc_info=error)


def methods_of(servicer: Any) -> dict[str, Method]:
    """Return the methods of a servicer by name, from bytes to bytes.

    `servicer` parses requests itself, as `router.api.grpc.service.InferenceServicer` does.
    """
    service = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    guarded = {each.name: guarded_unary(getattr(servicer, each.name)) for each in service.methods}
    return {
        each.name: guarded[each.name] if each.server_streaming else _unary(guarded[each.name])
        for each in service.methods
    }


def _unary(handler: Any) -> Method:
    async def answer(message: bytes, context: CallContext) -> None:
        await context.write(await handler(message, context))

    return answer


def _text(value: bytes) -> str | bytes:
    """Decode a metadata value; those whose names end in -bin may stay bytes."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value
