"""Checksums of transferred KV pages: the choice of the pages, and the thread that computes the checksums.

Both workers choose the same pages, which depend on the lease and on the rate that they agreed on in the handshake. So
the receiver detects a notice that lacks a checksum. On either side, a function of the engine computes the checksums
over the pages in place.

The function runs on a dedicated thread, because it waits for memory or for a device: it would block every stream of the
worker on the event loop, every other transfer on the transport's thread, and the running step on the engine thread. The
thread is a daemon, because a thread that waits for a hanging device cannot be ended.
"""

import hashlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kv_transfer.poll_backoff import wait_precisely
from tandem.protocol.errors import InvalidArgument, Unavailable
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import Lease, PageChecksum

log = logging.getLogger(__name__)

PageSums = Callable[[Sequence[int], Sequence[int], Sequence[int]], Sequence[int]]
"""Maps page ids to the checksums of the pages, given each page's number of filled token positions and its group.

A checksum is below 2^64. The call may block.
"""

METHOD = "sum of 32-bit words times 2 i + 1, mod 2^64"
"""The checksum method, which must be the same on both workers; the engine computes it."""


def chosen_pages(lease: Lease, pages: int, rate: float) -> tuple[int, ...]:
    """Choose the pages that get a checksum among the `pages` pages of a prompt; return their indices, ascending.

    Chooses ⌈`rate` · `pages`⌉ pages. They are evenly spaced, and the first one differs from lease to lease, so that
    every page is covered over time.
    """
    if rate <= 0.0:
        return ()
    count = min(pages, math.ceil(pages * rate))
    digest = hashlib.blake2b(f"{lease.request_id}/{lease.epoch}".encode(), digest_size=8).digest()
    first = int.from_bytes(digest, "little") % pages
    return tuple(sorted((first + turn * pages // count) % pages for turn in range(count)))


class PageChecks:
    """Computes checksums of this worker's pages, as sender or receiver. May be called from any thread.

    `close` ends the checksum thread, which keeps the engine's cache alive. The thread starts with the first checksum,
    so an instance that was never used needs no `close`. Owned by the worker.
    """

    def __init__(self, sums: PageSums, rate: float, kv: KvPages) -> None:
        """Create the checks; the fraction `rate` of each transfer's pages has a checksum, 0 = none.

        Raises InvalidArgument if `rate` is not between 0 and 1.
        """
        if not 0.0 <= rate <= 1.0:
            raise InvalidArgument("kv_checksum_rate", f"{rate:g} is not between 0 and 1")
        self._sums = sums
        self._rate = rate
        self._kv = kv
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._started = self._closed = False
        self._busy_since: float | None = None

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Return the facts for the handshake, so that peers choose the same pages and use the same method."""
        return (("kv_checksums", f"{METHOD}, of {self._rate:.6g} of the pages"),)

    def chosen(self, lease: Lease, prompt_tokens: int, skipped: int = 0) -> tuple[int, ...]:
        """Choose the pages of a hand-over that get a checksum, and return their indices in the prompt's page list.

        Only pages that are sent (`KvPages.sent`) are chosen, by the rule of `chosen_pages`. The first `skipped` pages
        are not sent.
        """
        sent = self._kv.sent(prompt_tokens, skipped)
        return tuple(sent[number] for number in chosen_pages(lease, len(sent), self._rate))

    def begin(
        self, pages: Sequence[int], entries: Sequence[int], prompt_tokens: int
    ) -> "Future[tuple[PageChecksum, ...]]":
        """Start to compute the checksums of the pages at the indices `entries` of `pages`; return a future for them.

        Nothing may write to the pages meanwhile. The future ends with the checksums, with the exception of the
        computation, or with Unavailable if `close` was called before.
        """
        future: Future[tuple[PageChecksum, ...]] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._sum(pages, entries, prompt_tokens))
                except Exception as error:
                    future.set_exception(error)

        try:
            self._put(work)
        except Unavailable as error:
            future.set_exception(error)
        return future

    def compare(
        self,
        pages: Sequence[int],
        expected: Sequence[PageChecksum],
        prompt_tokens: int,
        on_result: Callable[[str], None],
    ) -> None:
        """Compute the checksums of received pages, and call `on_result` with a description of the mismatch, or "".

        `on_result` is called on the checksum thread. After `close`, raises Unavailable and does not call `on_result`.
        """

        def work() -> None:
            try:
                computed = self._sum(pages, [checksum.page for checksum in expected], prompt_tokens)
                problem = _difference(computed, expected)
            except Exception as error:
                log.exception("received pages could not be summed")
                problem = f"pages that could not be checked ({type(error).__name__})"
            on_result(problem)

        self._put(work)

    @property
    def busy_s(self) -> float:
        """The time that the current checksum computation has taken so far, in seconds; 0 if there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Let the thread end after the checksums that were already requested; return without waiting for it.

        Later requests fail. Idempotent.
        """
        with self._gate:
            self._closed = True
            self._work.put(None)

    def _put(self, work: Callable[[], None]) -> None:
        with self._gate:
            if self._closed:
                raise Unavailable("this worker is closing and computes no more checksums; prefill again elsewhere")
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="page-checks", daemon=True).start()
            self._work.put(work)

    def _sum(self, pages: Sequence[int], entries: Sequence[int], prompt_tokens: int) -> tuple[PageChecksum, ...]:
        page_tokens, groups = self._kv.page_tokens, self._kv.groups
        stored = [prompt_tokens - entry // groups * page_tokens for entry in entries]
        filled = [min(page_tokens, tokens) for tokens in stored]
        sums = self._sums([pages[entry] for entry in entries], filled, [entry % groups for entry in entries])
        return tuple(map(PageChecksum, entries, sums))

    def _run(self) -> None:
        wait_precisely()
        for work in iter(self._work.get, None):
            self._busy_since = time.monotonic()
            try:
                work()
            except Exception:
                log.exception("the page checksum thread continues after an error")
            finally:
                self._busy_since = None
                del work  # otherwise it would keep its request alive until the next work arrives


def _difference(computed: Sequence[PageChecksum], expected: Sequence[PageChecksum]) -> str:
    wrong = [sent.page for sent, stored in zip(expected, computed, strict=True) if sent != stored]
    if not wrong:
        return ""
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"a checksum mismatch in page {wrong[0]}{more}, of {len(expected)} checked"
