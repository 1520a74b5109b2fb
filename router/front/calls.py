"""The router's side of a front process: serves the calls of its clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp

from router.api.grpc.access import GrpcAccess
from router.front.grpc_calls import GrpcCall, methods_of
from router.front.http_calls import HttpCall
from router.front.pulse import Pulse
from tandem.net.frames import FrameStream
from tandem.protocol.errors import Internal, from_code
from tandem.protocol.generated.tandem.v1 import front_pb2

RouterStream = FrameStream[front_pb2.RouterFrames, front_pb2.FrontFrames]
_Send = Callable[..., None]
_INTERNAL: int = Internal.grpc_status.value[0]


class FrontCalls:
    """All calls of one front process. Belongs to the event loop."""

    def __init__(self, stream: RouterStream, inference: GrpcAccess, app: ASGIApp) -> None:
        """`inference` and `app` serve the calls as they serve those of the router's own listeners."""
        self._stream = stream
        self._methods = methods_of(inference)
        self._inference = inference
        self._app = app
        self.opened = False
        """True if the front process has opened its listeners."""
        self._pulse = Pulse(lambda: stream.send(0, ask=front_pb2.Ask()))
        self._calls: dict[int, GrpcCall | HttpCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        stream.on_failed = self._fail

    async def run(self, on_opened: Callable[[], None], on_alive: Callable[[int], None]) -> None:
        """Serve calls until the front process is gone, then cancel those that still run.

        `on_opened` is called when its listeners are open, `on_alive` with its number of connections now and then.
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
                elif frame.HasField("rejected"):
                    await self._note(frame.rejected)
                elif frame.HasField("gone"):
                    self._leave(frame.call)
                elif frame.call in self._calls:
                    self._calls[frame.call].on_frame(frame)
        finally:
            for number in list(self._calls):
                self._leave(number)

    async def hangs(self) -> None:
        """Return when the front process has sent no heartbeat for too long."""
        await self._pulse.stops()

    def set_serving(self, serving: bool) -> None:
        """Set the status of the front process's health service."""
        self._stream.send(0, serving=serving)

    def leave(self, grace_s: float) -> None:
        """Let the front process accept no more calls, and end after `grace_s` seconds at the latest."""
        self._stream.send(0, leave_s=grace_s)

    async def _note(self, call: front_pb2.Rejected) -> None:
        await self._inference.rejected(call.method, call.peer, from_code(call.code, "rejected"))

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
        """End a call with Internal, because a frame of its answer could not be sent."""
        if number in self._calls:
            details = Internal("a part of the answer could not be sent; the server's log has the details")
            self._stream.send(number, end=front_pb2.CallEnd(status=_INTERNAL, details=details.message))
            self._leave(number)

    def _send_for(self, number: int) -> _Send:
        def send(**what: Any) -> None:
            if number in self._calls:  # nothing is sent to a client that has left
                self._stream.send(number, **what)

        return send
