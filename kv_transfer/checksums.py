"""Whether KV pages arrived as they left: which pages of a transfer are summed, and the thread that sums them.

Both workers choose the same pages, from the lease and the rate they agreed on when they were introduced, so a notice
cannot leave one out. Sums are computed over the pages where they lie, on either side, by a callable of the engine's.

A thread of its own does it: a sum waits for memory or for a device, so it would stop every stream of the worker on the
event loop, every other transfer on the transport's thread, and the running step on the engine's. It is a daemon, since
a device may hang and nobody can end a thread that waits for one.
"""

import hashlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from wire.errors import InvalidArgument
from wire.messages import Lease, PageChecksum

log = logging.getLogger(__name__)

PageSums = Callable[[Sequence[int], Sequence[int]], Sequence[int]]
"""(pages of the pool, how many token positions of each are filled) → the checksum of each, below 2^64. May wait."""

METHOD = "sum of 32-bit words times 2 i + 1, mod 2^64"
"""What two workers must agree on; the engine computes it."""


def chosen_pages(lease: Lease, pages: int, rate: float) -> tuple[int, ...]:
    """Numbers of those of a prompt's `pages` pages that are summed, in order: a `rate` part of them, at least one.

    None at rate 0. Evenly spread from a page that changes with each lease, so that every page has its turn.
    """
    if rate <= 0.0:
        return ()
    count = min(pages, math.ceil(pages * rate))
    digest = hashlib.blake2b(f"{lease.request_id}/{lease.epoch}".encode(), digest_size=8).digest()
    first = int.from_bytes(digest, "little") % pages
    return tuple(sorted((first + turn * pages // count) % pages for turn in range(count)))


class PageChecks:
    """Sums of this worker's pages, as sender or receiver. From any thread; `close` ends its own."""

    def __init__(self, sums: PageSums, rate: float, page_tokens: int) -> None:
        """`rate` is the part of each transfer's pages that is summed; 0 = none, then there is no thread either.

        InvalidArgument outside 0 to 1.
        """
        if not 0.0 <= rate <= 1.0:
            raise InvalidArgument("kv_checksum_rate", f"{rate:g} is not between 0 and 1")
        self._sums = sums
        self._rate = rate
        self._page_tokens = page_tokens
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        if rate > 0.0:
            threading.Thread(target=self._run, name="page-checks", daemon=True).start()

    def facts(self) -> tuple[tuple[str, str], ...]:
        """For the handshake: peers must choose the same pages and sum them alike."""
        return (("kv_checksums", f"{METHOD}, of {self._rate:.6g} of the pages"),)

    def chosen(self, lease: Lease, prompt_tokens: int) -> tuple[int, ...]:
        """See `chosen_pages`."""
        return chosen_pages(lease, -(-prompt_tokens // self._page_tokens), self._rate)

    def begin(
        self, pages: Sequence[int], numbers: Sequence[int], prompt_tokens: int
    ) -> "Future[tuple[PageChecksum, ...]]":
        """Sum the prompt's pages `numbers`; number n lies in `pages[n]`, which nobody writes to meanwhile."""
        future: Future[tuple[PageChecksum, ...]] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._sum(pages, numbers, prompt_tokens))
                except Exception as error:
                    future.set_exception(error)

        self._work.put(work)
        return future

    def compare(
        self,
        pages: Sequence[int],
        told: Sequence[PageChecksum],
        prompt_tokens: int,
        on_result: Callable[[str], None],
    ) -> None:
        """Sum what arrived; `on_result` hears what is wrong with it, empty = nothing, always on the checks' thread."""

        def work() -> None:
            try:
                mine = self._sum(pages, [each.page for each in told], prompt_tokens)
                problem = _difference(mine, told)
            except Exception as error:
                log.exception("pages that arrived could not be summed")
                problem = f"pages that could not be checked ({type(error).__name__})"
            on_result(problem)

        self._work.put(work)

    def close(self) -> None:
        """Nothing is summed from now on; a sum that runs is not waited for. Idempotent."""
        self._work.put(None)

    def _sum(self, pages: Sequence[int], numbers: Sequence[int], prompt_tokens: int) -> tuple[PageChecksum, ...]:
        filled = [min(self._page_tokens, prompt_tokens - number * self._page_tokens) for number in numbers]
        return tuple(map(PageChecksum, numbers, self._sums([pages[number] for number in numbers], filled)))

    def _run(self) -> None:
        for work in iter(self._work.get, None):
            try:
                work()
            except Exception:
                log.exception("pages are checked in spite of an error")


def _difference(mine: Sequence[PageChecksum], told: Sequence[PageChecksum]) -> str:
    wrong = [theirs.page for theirs, ours in zip(told, mine, strict=True) if theirs != ours]
    if not wrong:
        return ""
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"other bytes in page {wrong[0]}{more} than were sent, of {len(told)} that were checked"
