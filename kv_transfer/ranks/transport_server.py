"""The end of the pipe in a rank's process: it opens a transport over the rank's pages and carries out its calls."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from kv_transfer.base import NoticeHandler, PageWrite, RankTransport, WriteDone
from kv_transfer.checksums import PageSums
from kv_transfer.ranks.rank_messages import (
    OPENING,
    AddPeer,
    Close,
    CopyPages,
    Expect,
    Opened,
    Outbox,
    RemovePeer,
    Result,
    SharePages,
    Status,
    Sums,
    Write,
)

log = logging.getLogger(__name__)

STATUS_S = 0.1
"""Interval in seconds at which the rank reports its status."""


class CopyRankPages(Protocol):
    """A function that copies pages of a rank's pool to the first rows of memory that it shares, or back."""

    def __call__(self, pages: Sequence[int], *, to_pool: bool) -> None:
        """Copy the pages, and wait until that is done. Only one thread may call it at a time."""


def serve_transport(
    pipe: Connection,
    open_transport: Callable[[NoticeHandler], RankTransport],
    sums: PageSums,
    share_pages: Callable[[Path], CopyRankPages],
) -> None:
    """Open a rank's transport when the first rank asks for it, and carry out its calls until it closes the transport.

    Runs on a thread of the rank's process. `sums` computes the rank's part of the checksums of its pages, and
    `share_pages` returns the function that copies them to and from the memory in a file.
    """
    _TransportServer(pipe, open_transport, sums, share_pages).run()


class _TransportServer:
    """The rank's end of the pipe."""

    def __init__(
        self,
        pipe: Connection,
        open_transport: Callable[[NoticeHandler], RankTransport],
        sums: PageSums,
        share_pages: Callable[[Path], CopyRankPages],
    ) -> None:
        self._pipe, self._open_transport, self._sums, self._share_pages = pipe, open_transport, sums, share_pages
        self._copy: CopyRankPages | None = None
        self._outbox = Outbox(pipe, "to the first rank")
        self._pages = ThreadPoolExecutor(1, thread_name_prefix="rank pages")
        """The thread that sums and copies pages."""

    def run(self) -> None:
        try:
            self._pipe.recv()  # an `Open`
            transport = self._open()
            if transport is not None:
                try:
                    self._serve(transport)
                finally:
                    transport.close()
        except (EOFError, OSError):
            log.info("the first rank has closed its end")
        finally:
            self._pages.shutdown(wait=False)
            self._outbox.close()
            self._pipe.close()

    def _open(self) -> RankTransport | None:
        """Open the transport and report it, or report why it cannot be opened, and return None."""
        try:
            transport = self._open_transport(self._outbox.put)
            facts = transport.facts(), transport.open_ports(), Status.of(transport)
            self._outbox.put(Opened(transport.backend, transport.describe(), *facts))
        except Exception as error:
            self._outbox.put(Result(OPENING, None, str(error) or repr(error)))
            return None
        return transport

    def _serve(self, transport: RankTransport) -> None:
        """Carry out calls until the first rank closes the transport. Raises EOFError or OSError if it has ended."""
        status_at = 0.0
        while True:
            if time.monotonic() >= status_at:
                status_at = time.monotonic() + STATUS_S
                self._outbox.put(Status.of(transport))
            if not self._pipe.poll(STATUS_S):
                continue
            message = self._pipe.recv()
            if isinstance(message, Close):
                return
            try:
                self._carry_out(transport, message)
            except Exception:
                log.exception("a call of the first rank failed")

    def _carry_out(self, transport: RankTransport, message: object) -> None:
        match message:
            case Write():
                local, remote, begin_by = message.local_pages, message.remote_pages, message.begin_by
                write = PageWrite(
                    message.peer, local, remote, message.notice, begin_by=lambda: begin_by, groups=message.groups
                )
                try:
                    written = transport.write(write, message.deadline - time.monotonic())
                except Exception as error:
                    # The first rank waits for a result of each write.
                    self._outbox.put(Result(message.number, None, str(error) or repr(error)))
                    raise
                written.add_done_callback(partial(self._report, message.number))
            case Sums() | SharePages() | CopyPages():
                self._pages.submit(self._use_pages, message)
            case AddPeer():
                transport.add_peer(message.description, message.ranges)
            case RemovePeer():
                transport.remove_peer(message.peer)
            case Expect():
                transport.expect(message.leases)

    def _report(self, number: int, written: "Future[WriteDone]") -> None:
        error = written.exception()
        if error is None:
            self._outbox.put(Result(number, written.result()))
        else:
            self._outbox.put(Result(number, None, str(error)))

    def _use_pages(self, request: Sums | SharePages | CopyPages) -> None:
        """Carry out a call that reads or writes pages, and report its result."""
        try:
            self._outbox.put(Result(request.number, self._result(request)))
        except Exception as error:
            log.exception("pages could not be summed or copied")
            self._outbox.put(Result(request.number, None, f"pages could not be summed or copied: {error!r}"))

    def _result(self, request: Sums | SharePages | CopyPages) -> tuple[int, ...] | None:
        match request:
            case Sums():
                return tuple(self._sums(request.pages, request.filled, request.groups))
            case SharePages():
                self._copy = self._share_pages(request.path)
            case CopyPages():
                assert self._copy is not None
                self._copy(request.pages, to_pool=request.to_pool)
        return None
