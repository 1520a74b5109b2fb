"""The router's end of a front process: its clients' calls, made here, and what they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp

from router.api.service import InferenceServicer
from router.front.grpc_calls import GrpcCall, methods_of
from router.front.http_calls import HttpCall
from router.front.pulse import Pulse
from wire.errors import Internal
from wire.frames import FrameStream
from wire.generated.tandem.v1 import front_pb2

RouterStream = FrameStream[front_pb2.RouterFrames, front_pb2.FrontFrames]
_Send = Callable[..., None]
_INTERNAL: int = Internal.grpc_status.value[0]


class FrontCalls:
    """All calls of one front process. Belongs to the event loop."""

    def __init__(self, stream: RouterStream, inference: InferenceServicer, app: ASGIApp) -> None:
        """`inference` and `app` answer as they answer clients of this process's own listeners."""
        self._stream = stream
        self._methods = methods_of(inference)
        self._app = app
        self.opened = False
        """Whether that process has opened its listeners."""
        self._pulse = Pulse(lambda: stream.send(0, ask=front_pb2.Ask()))
        self._calls: dict[int, GrpcCall | HttpCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        stream.on_failed = self._fail

    async def run(self, on_opened: Callable[[], None], on_alive: Callable[[int], None]) -> None:
        """Until the process is gone; what its clients still wait for is cancelled. `on_opened`: its listeners are open;
        `on_alive` hears now and then how many connections it holds.
        """
        try:
            async for frame in self._stream.received():
                self._pulse.beat()
                if frame.HasField("grpc"):
                    self._begin(frame.call, GrpcCall(frame.grpc, self._methods, self._send_for(frame.call)))
                elif frame.HasField("http"):
                    self._begin(frame.call, HttpCall(frame.http, self._app, self._send_for(frame.call)))
                elif frame.HasField("opened"):
                    self.opened = True
                    on_opened()
                elif frame.HasField("alive"):
                    on_alive(frame.alive.connections)
                elif frame.HasField("gone"):
                    self._leave(frame.call)
                elif frame.call in self._calls:
                    self._calls[frame.call].hear(frame)
        finally:
            for number in list(self._calls):
                self._leave(number)

    async def hangs(self) -> None:
        """Returns when that process has said nothing for long, if it ever does."""
        await self._pulse.stops()

    def set_serving(self, serving: bool) -> None:
        """For the health service of that process."""
        self._stream.send(0, serving=serving)

    def leave(self, grace_s: float) -> None:
        """Take no more calls there, and end."""
        self._stream.send(0, leave_s=grace_s)

    def _begin(self, number: int, call: GrpcCall | HttpCall) -> None:
        self._calls[number] = call
        task = asyncio.create_task(call.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._calls.pop(number, None))

    def _leave(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is not None:
            call.leave()

    def _fail(self, number: int) -> None:
        """A part of its answer could not be sent."""
        if number in self._calls:
            details = Internal("a part of the answer could not be sent; the server's log has the details")
            self._stream.send(number, end=front_pb2.CallEnd(status=_INTERNAL, details=details.message))
            self._leave(number)

    def _send_for(self, number: int) -> _Send:
        def send(**what: Any) -> None:
            if number in self._calls:  # a client that has left hears nothing
                self._stream.send(number, **what)

        return send
