"""HTTP connections with deadlines for clients, and a limit on the number of connections."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tandem.settings.listeners import ListenerLimits

READ_BYTES = 16 << 10
"""Maximum number of bytes read from a connection at a time.

A read may contain many small chunks, which take about 15 µs each to parse, and other connections wait meanwhile.
"""
_CHUNKS_FREE, _CHUNK_BYTES_MIN = 1024, 16
"""Number of chunks that a body may have whatever their size, and minimum mean bytes per chunk of a body with more."""
_RETRY_AFTER_S = b"1"


class _Waits(Enum):
    """The data that a connection waits for next."""

    FIRST = auto()
    """The first byte of the connection's first request."""
    HEADER = auto()
    """The rest of a request's header."""
    BODY = auto()
    """The rest of a request's body."""
    REQUEST = auto()
    """Idle after a response (keep-alive): the first byte of the connection's next request. uvicorn limits this wait."""
    ANSWER = auto()
    """The request is complete: the server's response, which has no deadline here."""


class Connections:
    """All connections of one server, and the order in which idle connections are closed and large bodies are read.

    In each iteration of the event loop, only one connection with a large body is read. Reading all of them would delay
    all other clients.
    """

    def __init__(self, limits: ListenerLimits) -> None:
        self.limits = limits
        self._most = limits.connections
        self._waiting: dict[GuardedProtocol, None] = {}
        self._bodies: deque[GuardedProtocol] = deque()

    def admit(self, new: GuardedProtocol, count: int) -> bool:
        """Return True if a new connection may stay; `count` is the number of connections including it.

        If there are too many, the connection that has waited longest for a request is closed; if no connection waits,
        the new one is not accepted.
        """
        if count <= self._most:
            return True
        oldest = next(iter(self._waiting), None)
        if oldest is None:
            return False
        self.forget(oldest)
        oldest.transport.close()
        return True

    def waits(self, connection: GuardedProtocol) -> None:
        """Mark a connection as waiting for a request."""
        self._waiting.setdefault(connection)

    def forget(self, connection: GuardedProtocol) -> None:
        """Mark a connection as not waiting for a request."""
        self._waiting.pop(connection, None)

    def await_turn(self, connection: GuardedProtocol) -> None:
        """Pause a connection with a large body; it is resumed after those that wait already, one per loop iteration."""
        connection.transport.pause_reading()
        self._bodies.append(connection)
        if len(self._bodies) == 1:
            connection.loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        connection = self._bodies.popleft()
        if not connection.flow.read_paused:  # otherwise the application has not consumed the body so far
            connection.transport.resume_reading()
        if self._bodies:
            connection.loop.call_soon(self._next_turn)


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with deadlines for headers, bodies and unread responses.

    uvicorn itself has only a deadline between requests.
    """

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn: _CountedBody = _CountedBody(h11.SERVER)
        self._all = connections
        self._limits = connections.limits
        self._waits: tuple[_Waits, object] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Accept a connection, or close it with an error response if there are too many."""
        super().connection_made(transport)
        if hasattr(transport, "max_size"):
            transport.max_size = READ_BYTES
        _probe(transport.get_extra_info("socket"), self._limits)
        if not self._all.admit(self, len(self.connections)):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections are open; try again in a moment")
        self._rearm_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the connection's deadlines."""
        super().connection_lost(exc)
        self._all.forget(self)
        for timer in (self._deadline, self._unread):
            if timer is not None:
                timer.cancel()
        self._deadline = self._unread = None

    def data_received(self, data: bytes) -> None:
        """Process received data and update the deadline."""
        super().data_received(data)
        self._rearm_timeout()
        if self.conn.their_state is h11.SEND_BODY and self.conn.body_bytes > READ_BYTES:
            self._all.await_turn(self)

    def on_response_complete(self) -> None:
        """Update the deadline after a response."""
        super().on_response_complete()
        self._rearm_timeout()

    def send_400_response(self, msg: str) -> None:
        """Reject a malformed request."""
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def pause_writing(self) -> None:
        """Start the deadline for unread data, because the client does not read and the send buffer is full."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.unread_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the deadline for unread data."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _rearm_timeout(self) -> None:
        """Set the deadline for the data that the connection waits for, unless it is already set."""
        waits = self._awaited()
        if self.cycle is None or self.cycle.response_complete:
            self._all.waits(self)
        else:
            self._all.forget(self)
        if (waits, self.cycle) == self._waits:
            return
        self._waits = waits, self.cycle
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        seconds = self._seconds(waits)
        if seconds and not self.transport.is_closing():
            self._deadline = self.loop.call_later(seconds, self._expire, waits)

    def _awaited(self) -> _Waits:
        if self.conn.their_state is h11.SEND_BODY:
            return _Waits.BODY
        if self.conn.their_state is not h11.IDLE:
            return _Waits.ANSWER
        if self.conn.trailing_data[0]:
            return _Waits.HEADER
        return _Waits.FIRST if self.cycle is None else _Waits.REQUEST

    def _seconds(self, waits: _Waits) -> float:
        """Return the maximum time in seconds to wait for this data; 0 = unlimited here, because uvicorn has a limit."""
        if waits in {_Waits.FIRST, _Waits.HEADER}:
            return self._limits.header_timeout_s
        return self._limits.body_timeout_s if waits is _Waits.BODY else 0.0

    def _expire(self, waits: _Waits) -> None:
        if waits is _Waits.FIRST:
            self.transport.close()
            return
        what = "header" if waits is _Waits.HEADER else "body"
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the request's {what} did not come within {self._seconds(waits):g} s")

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        """Send an error response unless a response has begun, then close the connection."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE} and not self.transport.is_closing():
            body = f"{sentence}\n".encode()
            headers = [
                (b"content-type", b"text/plain; charset=utf-8"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            if status is HTTPStatus.SERVICE_UNAVAILABLE:
                headers.append((b"retry-after", _RETRY_AFTER_S))
            response = h11.Response(status_code=status, headers=headers, reason=status.phrase.encode())
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _CountedBody(h11.Connection):
    """An HTTP parser that rejects a body with chunks so small that parsing them would cost too much."""

    _chunks = 0
    body_bytes = 0
    """Number of bytes of the current request's body that were received so far."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self.body_bytes = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                # A proxy before this server may have used the other header (RFC 9112, section 6.1).
                raise h11.RemoteProtocolError("a request has Content-Length or Transfer-Encoding, not both")
        elif isinstance(event, h11.Data):
            self._chunks += 1
            self.body_bytes += len(event.data)
            if self._chunks > _CHUNKS_FREE and self.body_bytes < _CHUNK_BYTES_MIN * self._chunks:
                raise h11.RemoteProtocolError("the body comes in too many small chunks")
        return event


def _probe(connection: Any, limits: ListenerLimits) -> None:
    """Enable TCP keep-alive, so that the kernel detects clients whose host or network has failed."""
    if connection is None or connection.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    interval_s = max(1, round(limits.keepalive_s / 2))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, round(limits.keepalive_s))),
        ("TCP_KEEPINTVL", interval_s),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", round(1e3 * limits.unread_timeout_s)),
    ):
        if hasattr(socket, name):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
