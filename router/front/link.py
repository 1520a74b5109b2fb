"""A front process's end of its stream to the router: calls, each with a number."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from router.front.window import TOLD_EVERY
from wire.errors import Cancelled, Unavailable
from wire.frames import FrameStream
from wire.generated.tandem.v1 import front_pb2

_LOST = "the router ended while it answered; send the request again"

FrontStream = FrameStream[front_pb2.FrontFrames, front_pb2.RouterFrames]


class Call:
    """One client's call on its way to the router and back. Whoever opened it closes it."""

    def __init__(self, number: int, stream: FrontStream, forget: Callable[[int], None]) -> None:
        self._number = number
        self._stream = stream
        self._forget = forget
        self._frames: deque[front_pb2.RouterFrame] = deque()
        self._changed = asyncio.Event()
        self._passed = 0
        self._lost = self._ended = self._closed = False

    def send(self, **what: Any) -> None:
        """One field of a `FrontFrame`."""
        self._stream.send(self._number, **what)

    async def next(self) -> front_pb2.RouterFrame:
        """The router's next frame; Unavailable if the router is gone, Cancelled once it is closed."""
        while not self._frames:
            if self._closed:
                raise Cancelled("the client left")
            if self._lost:
                raise Unavailable(_LOST)
            self._changed.clear()
            await self._changed.wait()
        self._passed += 1  # the one before: whoever asks for the next has passed it on
        if self._passed > TOLD_EVERY:
            self.send(passed=TOLD_EVERY)
            self._passed -= TOLD_EVERY
        return self._frames.popleft()

    async def room(self) -> None:
        """Wait while the router has much to read."""
        await self._stream.room()

    def take(self, frame: front_pb2.RouterFrame) -> None:
        """Link side: a frame has come."""
        self._frames.append(frame)
        self._changed.set()

    def lose(self) -> None:
        """Link side: none will come."""
        self._lost = True
        self._changed.set()

    def end(self) -> None:
        """Its last frame was read: the router needs not hear that the client leaves."""
        self._ended = True

    def close(self) -> None:
        """The client has its answer, or has left: whoever waits for a frame hears so. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._forget(self._number)
        self._changed.set()
        if not (self._ended or self._lost):
            self.send(gone=front_pb2.Gone())


class RouterLink:
    """All calls of one front process. Belongs to the event loop."""

    def __init__(self, stream: FrontStream) -> None:
        self._stream = stream
        self._calls: dict[int, Call] = {}
        self._count = 0
        self._lost = False

    def call(self) -> Call:
        """A new one; Unavailable if the router is gone."""
        if self._lost:
            raise Unavailable(_LOST)
        self._count += 1
        made = self._calls[self._count] = Call(self._count, self._stream, self._forget)
        return made

    def opened(self) -> None:
        """Both doors are open."""
        self._stream.send(0, opened=front_pb2.Opened())

    def alive(self, connections: int) -> None:
        """This process does its work, for so many connections of clients."""
        self._stream.send(0, alive=front_pb2.Alive(connections=connections))

    async def run(
        self, on_serving: Callable[[bool], None], on_leave: Callable[[float], None], on_ask: Callable[[], None]
    ) -> None:
        """Bring frames to their calls until the router is gone. `on_serving` hears whether requests could be served,
        `on_leave` in how many seconds calls must have ended, `on_ask` that the router waits for `alive`.
        """
        async for frame in self._stream.received():
            call = self._calls.get(frame.call)
            if call is not None:
                call.take(frame)
            elif frame.HasField("serving"):
                on_serving(frame.serving)
            elif frame.HasField("leave_s"):
                on_leave(frame.leave_s)
            elif frame.HasField("ask"):
                on_ask()
        self._lost = True
        for call in self._calls.values():
            call.lose()

    def _forget(self, number: int) -> None:
        self._calls.pop(number, None)
