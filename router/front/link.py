"""The front process's side of its stream to the router: numbered calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from router.front.window import PART_BYTES_MAX, Acknowledger, Window, parts
from tandem.net.frames import FrameStream
from tandem.protocol.errors import Cancelled, Internal, ResourceExhausted, TandemError, Unavailable
from tandem.protocol.generated.tandem.v1 import front_pb2

MESSAGES_BYTES_MAX = 64 << 20
"""Most bytes of gRPC messages that wait until the router has read them; small messages are exempt.

gRPC delivers whole messages, so its clients cannot be slowed down by back-pressure as HTTP clients are.
"""
_RETRY_AFTER_S = 1.0
_LOST = "the router ended while it answered; send the request again"
_NOT_SENT = "a part of the request could not be sent to the router; the server's log has the details"

FrontStream = FrameStream[front_pb2.FrontFrames, front_pb2.RouterFrames]


class Call:
    """One client's call, relayed to the router. The opener must close it."""

    def __init__(self, number: int, stream: FrontStream, forget: Callable[[int], None]) -> None:
        self._number = number
        self._stream = stream
        self._forget = forget
        self._frames: deque[front_pb2.RouterFrame] = deque()
        self._changed = asyncio.Event()
        self._window = Window()
        self._read = Acknowledger(lambda count: stream.send(number, passed=count))
        self._handed_out: int | None = None
        """Bytes of the frame that `next` returned last."""
        self._error: TandemError | None = None
        self._ended = self._closed = False

    async def begin(self, **what: Any) -> None:
        """Send the first `FrontFrame`, of one field, once the router has read what was sent before."""
        await self._stream.send_in_turn(self._number, **what)

    async def send_body(self, data: bytes, *, more: bool) -> None:
        """Send a part of the request at the speed at which the handler reads it; nothing after the call's end."""
        *first, last = parts(data)
        for part in first:
            await self._send_part(part, more=True)
        await self._send_part(last, more=more)

    async def _send_part(self, data: bytes, *, more: bool) -> None:
        if self._over:
            return
        await self._stream.send_in_turn(self._number, body=front_pb2.HttpBody(data=data, more=more))
        if more:
            await self._window.sent(len(data))

    async def next(self) -> front_pb2.RouterFrame:
        """Return the router's next frame.

        Raises Unavailable if the router is gone, Internal if the request could not be sent, and Cancelled once the call
        is closed.
        """
        while not self._frames:
            if self._closed:
                raise Cancelled("the client left")
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        if self._handed_out is not None:  # the caller has passed the last frame on when it asks for the next
            self._read.add(self._handed_out)
        frame = self._frames.popleft()
        self._handed_out = len(frame.message) + len(frame.body.data)
        return frame

    def take(self, frame: front_pb2.RouterFrame) -> None:
        """Link side: add a received frame."""
        if frame.HasField("passed"):
            self._window.passed(frame.passed)
            return
        if frame.HasField("end") or (frame.HasField("body") and not frame.body.more):
            self._ended = True
            self._window.lift()
        self._frames.append(frame)
        self._changed.set()

    def fail(self, error: TandemError) -> None:
        """Link side: end the call with `error`, because no more frames will arrive."""
        self._error = error
        self._window.lift()
        self._changed.set()

    def close(self) -> None:
        """End the call after the client has its answer or has left; a waiting `next` raises Cancelled. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._forget(self._number)
        self._window.lift()
        self._changed.set()
        if not (self._ended or isinstance(self._error, Unavailable)):
            self._stream.send(self._number, gone=front_pb2.Gone())

    @property
    def _over(self) -> bool:
        return self._ended or self._closed or self._error is not None


class RouterLink:
    """Relays all calls of one front process to the router. Belongs to the event loop."""

    def __init__(self, stream: FrontStream) -> None:
        self._stream = stream
        self._calls: dict[int, Call] = {}
        self._count = 0
        self._lost = False
        self._messages_bytes = 0
        stream.on_failed = self._fail

    def call(self) -> Call:
        """Open a new call; raises Unavailable if the router is gone."""
        if self._lost:
            raise Unavailable(_LOST)
        self._count += 1
        made = self._calls[self._count] = Call(self._count, self._stream, self._forget)
        return made

    @contextlib.contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count a waiting message of `size` bytes; raises ResourceExhausted above `MESSAGES_BYTES_MAX`."""
        size = 0 if size <= PART_BYTES_MAX else size
        if size and self._messages_bytes + size > MESSAGES_BYTES_MAX:
            message = "too many large requests are waiting for the router; try again later"
            raise ResourceExhausted(message, retry_after_s=_RETRY_AFTER_S)
        self._messages_bytes += size
        try:
            yield
        finally:
            self._messages_bytes -= size

    def opened(self) -> None:
        """Report that both listeners are open."""
        self._stream.send(0, opened=front_pb2.Opened())

    def alive(self, connections: int) -> None:
        """Send a heartbeat with the number of client connections."""
        self._stream.send(0, alive=front_pb2.Alive(connections=connections))

    async def rejected(self, method: str, peer: str, error: TandemError) -> None:
        """Report a gRPC call that has no valid key, for the audit log; waits until the router has read what is sent."""
        await self._stream.send_in_turn(0, rejected=front_pb2.Rejected(method=method, peer=peer, code=error.code))

    async def run(
        self, on_serving: Callable[[bool], None], on_leave: Callable[[float], None], on_ask: Callable[[], None]
    ) -> None:
        """Deliver frames to their calls until the router is gone.

        `on_serving` is called with the health status, `on_leave` with the seconds in which calls must have ended,
        `on_ask` when the router asks for a heartbeat.
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
            call.fail(Unavailable(_LOST))

    def _forget(self, number: int) -> None:
        self._calls.pop(number, None)

    def _fail(self, number: int) -> None:
        """Fail a call, because a frame of it could not be sent."""
        if number in self._calls:
            self._calls[number].fail(Internal(_NOT_SENT))
