"""The transport of a rank in another process, used from the process of the first rank over a pipe.

The rank's process runs `serve_transport`, which opens a transport over the rank's pages and carries out the calls that
arrive. `RemoteTransport` makes the calls. Both processes are on one host, so times of `time.monotonic` are the same.
"""

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from kv_transfer.base import NoticeHandler, PageRanges, PageWrite, RankTransport, WriteDone
from kv_transfer.checksums import PageSums
from kv_transfer.ordered_writes import hold
from tandem.protocol.errors import TransferFailed
from tandem.protocol.messages import PeerDescription, PeerRef, TransferNotice

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 120.0
"""Maximum time in seconds until the rank's transport is open."""
CLOSE_TIMEOUT_S = 15.0
STATUS_S = 0.1
"""Interval in seconds at which the rank reports its status."""
SILENT_S = 0.5
"""Seconds without a message after which a rank is silent: half of the delay of reports of delivered notices.

Only time in which this process waits for a message counts: a busy host or a debugger delays both processes.
"""
_OPENING = -1
"""The number of the result of an `_Open` that failed."""


@dataclass(frozen=True, slots=True)
class _Status:
    """The facts about a transport that change."""

    poll_s: float
    name: str
    kinds: str
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, transport: RankTransport) -> "_Status":
        return cls(
            transport.transport_poll_s(),
            transport.transport_name(),
            transport.transport_kinds(),
            transport.warnings(),
        )


@dataclass(frozen=True, slots=True)
class _Opened:
    """The rank's transport is open."""

    backend: str
    description: PeerDescription
    facts: tuple[tuple[str, str], ...]
    open_ports: tuple[str, ...]
    status: _Status


@dataclass(frozen=True, slots=True)
class _Open:
    """A request to open the transport; the first message."""


@dataclass(frozen=True, slots=True)
class _Close:
    """A request to close the transport; the last message."""


@dataclass(frozen=True, slots=True)
class _AddPeer:
    """A call of `Transport.add_peer`."""

    description: PeerDescription
    ranges: PageRanges


@dataclass(frozen=True, slots=True)
class _RemovePeer:
    """A call of `Transport.remove_peer`."""

    peer: PeerRef


@dataclass(frozen=True, slots=True)
class _Expect:
    """A call of `Transport.expect`."""

    leases: int


@dataclass(frozen=True, slots=True)
class _Write:
    """A write that may begin at once; `begin_by` and `deadline` are times of `time.monotonic`."""

    number: int
    peer: PeerRef
    local_pages: tuple[int, ...]
    remote_pages: tuple[int, ...]
    groups: tuple[int, ...]
    notice: TransferNotice | None
    begin_by: float
    deadline: float


@dataclass(frozen=True, slots=True)
class _Sums:
    """A request for the checksums of pages."""

    number: int
    pages: tuple[int, ...]
    filled: tuple[int, ...]
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of a write or of checksums, or the message of its error."""

    number: int
    value: Any
    error: str | None = None


class ReceivedMessages:
    """Iterates over the messages that a rank sends over a pipe, until it closes its end, and measures its silence."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.silent_s = 0.0
        """Seconds without a message, in steps of `SILENT_S`; 0 before the first one. Any thread may read it."""

    def __iter__(self) -> Iterator[object]:
        """Wait for messages, on the thread that iterates."""
        reports = False
        while True:
            try:
                if not self._pipe.poll(SILENT_S):
                    self.silent_s += SILENT_S if reports else 0.0
                    continue
                message = self._pipe.recv()
            except (EOFError, OSError):
                return
            reports, self.silent_s = True, 0.0
            yield message

    def ignore(self) -> None:
        """Wait for messages that only show that the rank runs, until it closes its end."""
        for _ in self:
            pass


class _Outbox:
    """Sends messages to the other end of a pipe on a thread, so that no caller waits for the other end to read."""

    def __init__(self, pipe: Connection, name: str) -> None:
        self._pipe = pipe
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        """Send a message after those that were put before; without effect once the other end is closed."""
        self._messages.put(message)

    def close(self) -> None:
        """Send what was put before, and end the thread; return when both are done, or after `CLOSE_TIMEOUT_S`."""
        self._messages.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            for message in iter(self._messages.get, None):
                self._pipe.send(message)


class RemoteTransport(RankTransport):
    """The transport of a rank in another process. Any thread may call it, after `open`; no call waits for the rank.

    If the pipe closes, all results that are outstanding fail. The rank's process ends then, and the worker with it.
    """

    def __init__(self, pipe: Connection, rank: int) -> None:
        self._pipe, self._rank = pipe, rank
        self._outbox = _Outbox(pipe, f"to rank {rank}")
        self._gate = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] | None = {}
        """The results that are outstanding, by number; None once the pipe is closed."""
        self._expects = False
        self._messages = ReceivedMessages(pipe)
        self._opened: Future[_Opened] = Future()
        self._reader: threading.Thread | None = None

    def open(self, on_notice: NoticeHandler) -> "RemoteTransport":
        """Open the rank's transport, and return this object. `on_notice` is called on this object's thread.

        Raises TransferFailed if the transport cannot be opened, or not in time.
        """
        self._on_notice = on_notice
        self._reader = threading.Thread(target=self._read, name=f"from rank {self._rank}", daemon=True)
        self._reader.start()
        self._outbox.put(_Open())
        try:
            opened = self._opened.result(OPEN_TIMEOUT_S)
        except TimeoutError:
            raise TransferFailed(
                f"rank {self._rank} has not opened its transport within {OPEN_TIMEOUT_S:g} s; try `tandem doctor`"
            ) from None
        self.backend, self._facts = opened.backend, opened.facts
        self._description, self._open_ports = opened.description, opened.open_ports
        return self

    def add_peer(self, description: PeerDescription, ranges: PageRanges = ()) -> None:
        """Register a peer; what the rank's transport refuses is only logged there."""
        self._outbox.put(_AddPeer(description, ranges))

    def remove_peer(self, peer: PeerRef) -> None:
        """Remove this incarnation of a peer and earlier ones."""
        self._outbox.put(_RemovePeer(peer))

    def write(self, write: PageWrite, deadline_s: float) -> "Future[WriteDone]":
        """Post a write once the writes in `after` have ended; it is held in this process until then."""
        future: Future[WriteDone] = Future()
        future.set_running_or_notify_cancel()
        hold(write.after, partial(self._begin, write, time.monotonic() + deadline_s, future))
        return future

    def _begin(self, write: PageWrite, deadline: float, future: "Future[WriteDone]", why_not: str) -> None:
        if why_not:
            future.set_exception(TransferFailed(f"write to {write.peer.worker_id}: {why_not}; prefill again"))
            return
        pages = tuple(write.local_pages), tuple(write.remote_pages), tuple(write.groups)
        begin_by = write.begin_by()
        self._request(future, lambda n: _Write(n, write.peer, *pages, write.notice, begin_by, deadline))

    def sums(self, pages: Sequence[int], filled: Sequence[int], groups: Sequence[int]) -> "Future[Sequence[int]]":
        """Start to compute the rank's checksums of pages (`kv_transfer.checksums.PageSums`)."""
        future: Future[Sequence[int]] = Future()
        self._request(future, lambda number: _Sums(number, tuple(pages), tuple(filled), tuple(groups)))
        return future

    def describe(self) -> PeerDescription:
        """Return the description of the rank's memory."""
        return self._description

    def expect(self, leases: int) -> None:
        """Set whether a notice or a write may arrive; the transport does not need the number."""
        if bool(leases) != self._expects:
            self._expects = bool(leases)
            self._outbox.put(_Expect(leases))

    def transport_poll_s(self) -> float:
        """Return the polling time that the rank has reported last."""
        return self._status.poll_s

    def silent_s(self) -> float:
        """Return the seconds in which the open rank has sent nothing, in steps of `SILENT_S`; 0 if it is not silent."""
        return self._messages.silent_s

    def transport_name(self) -> str:
        """Return the name that the rank has reported last."""
        return self._status.name

    def transport_kinds(self) -> str:
        """Return the kinds of UCX transports that the rank has reported last."""
        return self._status.kinds

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Return the facts of the rank's transport."""
        return self._facts

    def open_ports(self) -> tuple[str, ...]:
        """Return host:port of each TCP socket on which the rank's transport listens."""
        return self._open_ports

    def warnings(self) -> tuple[str, ...]:
        """Return the warnings that the rank has reported last."""
        return self._status.warnings

    def close(self) -> None:
        """Close the rank's transport, wait for it for a bounded time, and fail the results that are outstanding.

        Idempotent.
        """
        if self._reader is not None:
            self._outbox.put(_Close())
            self._reader.join(CLOSE_TIMEOUT_S)
            self._fail_all()
        self._outbox.close()
        self._pipe.close()

    def _request(self, future: "Future[Any]", message: Callable[[int], object]) -> None:
        number = next(self._numbers)
        with self._gate:
            is_open = self._pending is not None
            if self._pending is not None:
                self._pending[number] = future
        if is_open:
            self._outbox.put(message(number))
        else:
            future.set_exception(self._gone())

    def _read(self) -> None:
        """Receive results, notices and reports until the rank closes its end."""
        for message in self._messages:
            try:
                self._take(message)
            except Exception:
                log.exception("a message of rank %d could not be processed", self._rank)
        self._fail_all()

    def _fail_all(self) -> None:
        with self._gate:
            pending, self._pending = self._pending or {}, None
        if not self._opened.done():
            self._opened.set_exception(self._gone())
        for future in pending.values():
            future.set_exception(self._gone())

    def _gone(self) -> TransferFailed:
        return TransferFailed(f"rank {self._rank} of this worker has closed its transport; prefill again")

    def _pop(self, number: int) -> "Future[Any] | None":
        """Return the future of a result, which nobody else completes then."""
        if number == _OPENING:
            return self._opened
        with self._gate:
            return None if self._pending is None else self._pending.pop(number, None)

    def _take(self, message: object) -> None:
        match message:
            case TransferNotice():
                self._on_notice(message)
            case _Status():
                self._status = message
            case _Opened():
                self._status = message.status
                self._opened.set_result(message)
            case _Result():
                future = self._pop(message.number)
                if future is None:
                    return
                if message.error is not None:
                    future.set_exception(TransferFailed(message.error))
                else:
                    future.set_result(message.value)


def serve_transport(pipe: Connection, open_transport: Callable[[NoticeHandler], RankTransport], sums: PageSums) -> None:
    """Open a rank's transport when the first rank asks for it, and carry out its calls until it closes the transport.

    Runs on a thread of the rank's process. `sums` computes the rank's part of the checksums of its pages.
    """
    _TransportServer(pipe, open_transport, sums).run()


class _TransportServer:
    """The rank's end of the pipe."""

    def __init__(
        self, pipe: Connection, open_transport: Callable[[NoticeHandler], RankTransport], sums: PageSums
    ) -> None:
        self._pipe, self._open_transport, self._sums = pipe, open_transport, sums
        self._outbox = _Outbox(pipe, "to the first rank")
        self._summing = ThreadPoolExecutor(1, thread_name_prefix="page sums")

    def run(self) -> None:
        try:
            self._pipe.recv()  # an `_Open`
            transport = self._open()
            if transport is not None:
                try:
                    self._serve(transport)
                finally:
                    transport.close()
        except (EOFError, OSError):
            log.info("the first rank has closed its end")
        finally:
            self._summing.shutdown(wait=False)
            self._outbox.close()
            self._pipe.close()

    def _open(self) -> RankTransport | None:
        """Open the transport and report it, or report why it cannot be opened, and return None."""
        try:
            transport = self._open_transport(self._outbox.put)
            facts = transport.facts(), transport.open_ports(), _Status.of(transport)
            self._outbox.put(_Opened(transport.backend, transport.describe(), *facts))
        except Exception as error:
            self._outbox.put(_Result(_OPENING, None, str(error) or repr(error)))
            return None
        return transport

    def _serve(self, transport: RankTransport) -> None:
        """Carry out calls until the first rank closes the transport. Raises EOFError or OSError if it has ended."""
        status_at = 0.0
        while True:
            if time.monotonic() >= status_at:
                status_at = time.monotonic() + STATUS_S
                self._outbox.put(_Status.of(transport))
            if not self._pipe.poll(STATUS_S):
                continue
            message = self._pipe.recv()
            if isinstance(message, _Close):
                return
            try:
                self._carry_out(transport, message)
            except Exception:
                log.exception("a call of the first rank failed")

    def _carry_out(self, transport: RankTransport, message: object) -> None:
        match message:
            case _Write():
                local, remote, begin_by = message.local_pages, message.remote_pages, message.begin_by
                write = PageWrite(
                    message.peer, local, remote, message.notice, begin_by=lambda: begin_by, groups=message.groups
                )
                written = transport.write(write, message.deadline - time.monotonic())
                written.add_done_callback(partial(self._report, message.number))
            case _Sums():
                self._summing.submit(self._sum, message)
            case _AddPeer():
                transport.add_peer(message.description, message.ranges)
            case _RemovePeer():
                transport.remove_peer(message.peer)
            case _Expect():
                transport.expect(message.leases)

    def _report(self, number: int, written: "Future[WriteDone]") -> None:
        error = written.exception()
        if error is None:
            self._outbox.put(_Result(number, written.result()))
        else:
            self._outbox.put(_Result(number, None, str(error)))

    def _sum(self, request: _Sums) -> None:
        try:
            self._outbox.put(_Result(request.number, tuple(self._sums(request.pages, request.filled, request.groups))))
        except Exception as error:
            log.exception("pages could not be summed")
            self._outbox.put(_Result(request.number, None, f"pages could not be summed: {error!r}"))
