"""The transport of a rank in another process, used from the process of the first rank over a pipe.

The rank's process runs `serve_transport`, which opens a transport over the rank's pages and carries out the calls that
arrive. `RemoteTransport` makes the calls. Both processes are on one host, so times of `time.monotonic` are the same.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kv_transfer.base import NoticeHandler, PageRanges, PageWrite, RankTransport, WriteDone
from kv_transfer.ordered_writes import hold
from kv_transfer.ranks.rank_messages import (
    CLOSE_TIMEOUT_S,
    OPENING,
    AddPeer,
    Close,
    CopyPages,
    Expect,
    Open,
    Opened,
    Outbox,
    ReceivedMessages,
    RemovePeer,
    Result,
    SharePages,
    Status,
    Sums,
    Write,
)
from tandem.protocol.errors import TransferFailed
from tandem.protocol.messages import PeerDescription, PeerRef, TransferNotice

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 120.0
"""Maximum time in seconds until the rank's transport is open."""


class RemoteTransport(RankTransport):
    """The transport of a rank in another process. Any thread may call it, after `open`; no call waits for the rank.

    If the pipe closes, all results that are outstanding fail. The rank's process ends then, and the worker with it.
    """

    def __init__(self, pipe: Connection, rank: int) -> None:
        self._pipe, self._rank = pipe, rank
        self._outbox = Outbox(pipe, f"to rank {rank}")
        self._gate = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] | None = {}
        """The results that are outstanding, by number; None once the pipe is closed."""
        self._expects = False
        self._messages = ReceivedMessages(pipe)
        self._opened: Future[Opened] = Future()
        self._reader: threading.Thread | None = None

    def open(self, on_notice: NoticeHandler) -> "RemoteTransport":
        """Open the rank's transport, and return this object. `on_notice` is called on this object's thread.

        Raises TransferFailed if the transport cannot be opened, or not in time.
        """
        self._on_notice = on_notice
        self._reader = threading.Thread(target=self._read, name=f"from rank {self._rank}", daemon=True)
        self._reader.start()
        self._outbox.put(Open())
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
        self._outbox.put(AddPeer(description, ranges))

    def remove_peer(self, peer: PeerRef) -> None:
        """Remove this incarnation of a peer and earlier ones."""
        self._outbox.put(RemovePeer(peer))

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
        self._request(future, lambda n: Write(n, write.peer, *pages, write.notice, begin_by, deadline))

    def sums(self, pages: Sequence[int], filled: Sequence[int], groups: Sequence[int]) -> "Future[Sequence[int]]":
        """Start to compute the rank's checksums of pages (`kv_transfer.checksums.PageSums`)."""
        future: Future[Sequence[int]] = Future()
        self._request(future, lambda number: Sums(number, tuple(pages), tuple(filled), tuple(groups)))
        return future

    def share_pages(self, path: Path) -> "Future[None]":
        """Let the rank map the memory in the file `path`, for `copy_pages`."""
        future: Future[None] = Future()
        self._request(future, lambda number: SharePages(number, path))
        return future

    def copy_pages(self, pages: Sequence[int], *, to_pool: bool) -> "Future[None]":
        """Start to copy pages of the rank's pool to the first rows of the shared memory, or back if `to_pool`."""
        future: Future[None] = Future()
        self._request(future, lambda number: CopyPages(number, tuple(pages), to_pool))
        return future

    def describe(self) -> PeerDescription:
        """Return the description of the rank's memory."""
        return self._description

    def expect(self, leases: int) -> None:
        """Set whether a notice or a write may arrive; the transport does not need the number."""
        if bool(leases) != self._expects:
            self._expects = bool(leases)
            self._outbox.put(Expect(leases))

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
            self._outbox.put(Close())
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
        if number == OPENING:
            return self._opened
        with self._gate:
            return None if self._pending is None else self._pending.pop(number, None)

    def _take(self, message: object) -> None:
        match message:
            case TransferNotice():
                self._on_notice(message)
            case Status():
                self._status = message
            case Opened():
                self._status = message.status
                self._opened.set_result(message)
            case Result():
                future = self._pop(message.number)
                if future is None:
                    return
                if message.error is not None:
                    future.set_exception(TransferFailed(message.error))
                else:
                    future.set_result(message.value)
