"""Ownership of the KV cache's pages, and the number of pages that are promised.

A page is in exactly one state:

    free         unowned; only the pool hands it out
    owned        by one attempt at one request: it alone writes the page, and its scheduler frees it
    shared       read-only and counted: each `retain` is undone by one `release`, after the last of which it is cached
    cached       without readers, but the prefix cache knows its contents: free capacity that may still be reused
    advertised   by a lease: the prefill worker named there may write it at any moment, and nothing else touches it
    quarantined  of a dead lease whose late writes may still land: free again only by `free_quarantined`

A promise is a credit without pages: it withholds a number of free pages from callers without a promise. Cached pages
count as free, and are evicted when no free page is left, least recently used first: no request is ever refused because
of them.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from tandem.engine.cache.free_pages import FreePages
from tandem.engine.cache.page_census import PageCensus, PageCounts, lease_name
from tandem.protocol.errors import Internal, ResourceExhausted, StaleEpoch
from tandem.protocol.messages import Lease, RequestRef


class PagePool:
    """The pages 0 .. total - 1. Every method is thread-safe, takes microseconds and changes all or nothing.

    ResourceExhausted means that there is no free page now; StaleEpoch, that a lease holds no such pages (any more);
    Internal, that the caller named pages it does not own: a defect.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self.lock = threading.RLock()
        """Held by callers that do several things at once: nothing changes while it is held. Held for microseconds."""
        self._free = FreePages(range(total))
        self._promised = 0
        self._owned: dict[RequestRef, dict[int, None]] = {}
        self._shared: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._on_taken: Callable[[int], None] = lambda _page: None
        self._advertised: dict[Lease, list[int]] = {}
        self._quarantined: dict[Lease, list[int]] = {}

    def on_eviction(self, on_taken: Callable[[int], None]) -> None:
        """Registers `on_taken(page)`, called under the lock for each cached page that is evicted."""
        self._on_taken = on_taken

    def promise(self, pages: int) -> None:
        """Withholds `pages` free pages for a later allocation; undone by `unpromise` or spent page by page."""
        with self.lock:
            self._need(pages)
            self._promised += pages

    def promise_up_to(self, pages: int) -> int:
        """Promises `pages` pages, or as many as are free; returns the number promised."""
        with self.lock:
            promised = max(0, min(pages, self._unreserved))
            self._promised += promised
            return promised

    def unpromise(self, pages: int) -> None:
        """Returns the rest of a promise, which the caller keeps count of."""
        with self.lock:
            self._spend(pages)

    def allocate(self, owner: RequestRef, pages: int, *, from_promise: bool = False) -> list[int]:
        """Gives free pages to the owner, who frees them with `free`; `from_promise` spends an earlier promise."""
        with self.lock:
            taken = self._take(pages, from_promise)
            if taken:
                self._owned.setdefault(owner, {}).update(dict.fromkeys(taken))
            return taken

    def allocate_each(self, owners: Sequence[RequestRef]) -> list[int]:
        """Returns one promised page for each owner, as `allocate` would give them one by one."""
        with self.lock:
            taken = [self._take(1, from_promise=True)[0] for _ in owners]
            for owner, page in zip(owners, taken, strict=True):
                self._owned.setdefault(owner, {})[page] = None
            return taken

    def advertise(self, lease: Lease, pages: int, *, from_promise: bool = True) -> list[int]:
        """Gives free pages to the lease, for its prefill worker to write.

        Ended by `adopt`, `quarantine` or `free_lease`.
        """
        with self.lock:
            if lease in self._quarantined:
                raise StaleEpoch(f"Lease {lease_name(lease)} is over; ask for a new one.")
            taken = self._take(pages, from_promise)
            if taken:
                self._advertised.setdefault(lease, []).extend(taken)
            return list(taken)

    def adopt(self, lease: Lease, owner: RequestRef) -> list[int]:
        """Gives a lease's pages, written and quiescent, to the owner, in the order in which they were advertised."""
        with self.lock:
            pages = self._pop(self._advertised, lease)
            self._owned.setdefault(owner, {}).update(dict.fromkeys(pages))
            return pages

    def quarantine(self, lease: Lease) -> list[int]:
        """Quarantines the pages of a lease that is over while late writes may land: unused until `free_quarantined`."""
        with self.lock:
            pages = self._pop(self._advertised, lease)
            self._quarantined[lease] = pages
            return list(pages)

    def free_lease(self, lease: Lease) -> int:
        """Frees advertised pages that the prefill worker has released and writes no more; returns their number."""
        with self.lock:
            return self._give_back(self._pop(self._advertised, lease))

    def free_quarantined(self, lease: Lease) -> int:
        """Frees quarantined pages once their writer is known to be quiescent, or dead for long enough.

        Returns their number.
        """
        with self.lock:
            return self._give_back(self._pop(self._quarantined, lease))

    def free(self, owner: RequestRef, pages: Sequence[int] | None = None) -> int:
        """Frees these pages of the owner, or all it has (perhaps none); returns their number."""
        with self.lock:
            held = self._owned.get(owner, {})
            return self._give_back(self._disown(owner, list(held) if pages is None else pages))

    def share(self, owner: RequestRef, pages: Sequence[int]) -> None:
        """Turns the owner's pages into shared ones, read by the caller, who must `release` each."""
        with self.lock:
            self._shared.update(dict.fromkeys(self._disown(owner, pages), 1))

    def retain(self, pages: Sequence[int]) -> int:
        """Adds one reader to each of these shared or cached pages; the reader must `release` it.

        A cached page is not free any longer: only as many of the first pages are retained as promises allow. Returns
        their number.
        """
        with self.lock:
            self._need_known(pages, [page for page in pages if page not in self._shared and page not in self._cached])
            room = self._unreserved
            for count, page in enumerate(pages):
                if page in self._cached:
                    if not room:
                        return count
                    room -= 1
                    del self._cached[page]
                self._shared[page] = self._shared.get(page, 0) + 1
            return len(pages)

    def release(self, pages: Sequence[int]) -> int:
        """Removes one reader from each shared page.

        Those without readers are cached, the first of them to be evicted first.

        Returns the number of those without readers.
        """
        with self.lock:
            self._need_known(pages, [page for page in pages if page not in self._shared])
            cached = 0
            for page in pages:
                self._shared[page] -= 1
                if self._shared[page] == 0:
                    del self._shared[page]
                    self._cached[page] = None
                    cached += 1
            return cached

    def drop_cached(self, pages: Sequence[int]) -> None:
        """Evicts these cached pages, which nobody will look for any more; `on_taken` is not called."""
        with self.lock:
            self._need_known(pages, [page for page in pages if page not in self._cached])
            for page in pages:
                del self._cached[page]
            self._free.give(pages)

    @property
    def total(self) -> int:
        """The number of pages in all states."""
        return self._total

    @property
    def unreserved(self) -> int:
        """The number of pages that are unused and not promised; the only one of the counts that is cheap."""
        with self.lock:
            return self._unreserved

    def counts(self) -> PageCounts:
        """Returns the number of pages in each state, all at one moment."""
        with self.lock:
            return self._census().counts()

    def readers(self) -> dict[int, int]:
        """Returns the number of readers of each shared or cached page; cached ones (0) in the order of eviction."""
        with self.lock:
            return self._shared | dict.fromkeys(self._cached, 0)

    def check_integrity(self) -> None:
        """Raises Internal with all faults, unless every page is in exactly one state and promises can be kept."""
        with self.lock:
            faults = list(self.faults())
        if faults:
            raise Internal(f"The page pool is inconsistent: {'; '.join(faults)}.")

    def faults(self) -> Iterable[str]:
        """Returns each inconsistency as a sentence; under the lock."""
        return self._census().faults()

    def _census(self) -> PageCensus:
        return PageCensus(
            self._total,
            self._free,
            self._owned,
            self._shared,
            self._cached,
            self._advertised,
            self._quarantined,
            self._promised,
        )

    def _take(self, pages: int, from_promise: bool) -> list[int]:
        if from_promise:
            self._spend(pages)
        else:
            self._need(pages)
        while len(self._free) < pages:
            page, _ = self._cached.popitem(last=False)
            self._free.give([page])
            self._on_taken(page)
        return self._free.take(pages)

    def _spend(self, pages: int) -> None:
        if not 0 <= pages <= self._promised:
            raise Internal(f"{pages} promised pages were spent or given back, {self._promised} are promised.")
        self._promised -= pages

    def _need(self, pages: int) -> None:
        if pages < 0:
            raise Internal(f"{pages} pages were asked for.")
        if pages > self._unreserved:
            raise ResourceExhausted(
                f"{pages} KV pages are needed and {self._unreserved} of {self._total} are free; try again soon."
            )

    @property
    def _unreserved(self) -> int:
        """The number of pages that may be handed out without a promise."""
        return len(self._free) + len(self._cached) - self._promised

    @staticmethod
    def _need_known(pages: Sequence[int], strangers: Sequence[int]) -> None:
        if strangers or len(set(pages)) != len(pages):
            raise Internal(f"Pages {strangers or list(pages)} are not shared, or named twice.")

    def _disown(self, owner: RequestRef, pages: Sequence[int]) -> Sequence[int]:
        held = self._owned.get(owner, {})
        strangers = [page for page in pages if page not in held]
        if strangers or len(set(pages)) != len(pages):
            raise Internal(
                f"{owner.request_id}#{owner.attempt} does not own pages {strangers or list(pages)} once each."
            )
        for page in pages:
            del held[page]
        if not held:
            self._owned.pop(owner, None)
        return pages

    def _pop(self, leases: dict[Lease, list[int]], lease: Lease) -> list[int]:
        if lease not in leases:
            raise StaleEpoch(f"Lease {lease_name(lease)} holds no such pages; it is over or was never granted here.")
        return leases.pop(lease)

    def _give_back(self, pages: Sequence[int]) -> int:
        self._free.give(pages)
        return len(pages)
