"""The page pool records who owns each page of the KV cache, and how many pages are reserved.

Each page is in exactly one state:

    free         no one owns it; only the pool hands it out
    owned        by one attempt at one request: only this attempt writes the page, and its scheduler frees it
    shared       read-only, with a count of readers: `retain` adds one, `release` removes one, the last makes it cached
    cached       no request reads it, but the prefix cache knows its contents: it counts as free, and may be reused
    advertised   by a lease: the prefill worker named in the lease may write it at any moment, so nothing else uses it
    quarantined  its lease has ended, but late writes may still arrive: only `free_quarantined` makes it free again

A reservation (`reserve`) withholds a number of free pages from callers without a reservation; it names no particular
pages. Cached pages count as free: when no free page is left they are evicted (`eviction_order.py`), so cached pages
never cause a request to be refused.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from tandem.engine.cache.eviction_order import EvictionOrder
from tandem.engine.cache.free_pages import FreePages
from tandem.engine.cache.page_census import PageCensus, PageCounts, lease_name
from tandem.protocol.errors import Internal, ResourceExhausted, StaleEpoch
from tandem.protocol.messages import Lease, RequestRef


class PagePool:
    """The pages 0 .. total - 1 of one KV cache.

    Every method is thread-safe, takes microseconds, and either succeeds or changes nothing. Methods raise
    ResourceExhausted if too few pages are free at the moment; StaleEpoch if a lease has no pages, or no longer has any,
    in the required state; and Internal if the caller names pages that it does not own, which is a defect.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a pool of free pages; `clock` returns the time in seconds, by which pages are kept."""
        self._total = total
        self.lock = threading.RLock()
        """The pool's lock, which callers hold around several calls that must be atomic together.

        It is reentrant, and held for microseconds only.
        """
        self._free = FreePages(range(total))
        self._reserved = 0
        self._owned: dict[RequestRef, dict[int, None]] = {}
        self._shared: dict[int, int] = {}
        self._cached = EvictionOrder(clock)
        self._on_taken: Callable[[int], None] = lambda _page: None
        self._on_cached: Callable[[int], None] | None = None
        self._advertised: dict[Lease, list[int]] = {}
        self._quarantined: dict[Lease, list[int]] = {}

    def on_eviction(self, on_taken: Callable[[int], None]) -> None:
        """Register `on_taken(page)`, which is called under the lock for each cached page that is evicted."""
        self._on_taken = on_taken

    def on_cached(self, on_cached: Callable[[int], None]) -> None:
        """Register `on_cached(page)`, which is called under the lock for each page whose last reader releases it."""
        self._on_cached = on_cached

    def limit_kept(self, share: Callable[[], int]) -> None:
        """Register `share()`, which returns the maximum number of kept pages of one tenant."""
        self._cached.share = share

    def keep(self, pages: Sequence[int], tenant: str, seconds: float) -> None:
        """Evict these shared pages after others until `seconds` from now, within the share of the tenant.

        The caller names with each page all pages before it in its prefix.
        """
        with self.lock:
            self._need_known(pages, [page for page in pages if page not in self._shared])
            self._cached.mark(pages, tenant, seconds)

    def reserve(self, pages: int) -> None:
        """Reserve `pages` free pages for a later allocation.

        The caller uses up the reservation by allocations, and returns the rest with `unreserve`. Raises
        ResourceExhausted if fewer pages are free and unreserved.
        """
        with self.lock:
            self._need(pages)
            self._reserved += pages

    def reserve_up_to(self, pages: int) -> int:
        """Reserve `pages` pages, or all free and unreserved pages if there are fewer; return the number reserved."""
        with self.lock:
            reserved = max(0, min(pages, self._unreserved))
            self._reserved += reserved
            return reserved

    def unreserve(self, pages: int) -> None:
        """Return `pages` reserved pages that were not allocated.

        The caller keeps count of its reservation; the pool only has the total.
        """
        with self.lock:
            self._spend(pages)

    def allocate(self, owner: RequestRef, pages: int, *, from_reserved: bool = False) -> list[int]:
        """Allocate free pages to `owner`, which returns them with `free`.

        With `from_reserved` the pages are taken from an earlier reservation.

        Raises ResourceExhausted if too few pages are free and unreserved, and Internal if the reservation is too small.
        """
        with self.lock:
            taken = self._take(pages, from_reserved)
            if taken:
                self._owned.setdefault(owner, {}).update(dict.fromkeys(taken))
            return taken

    def allocate_each(self, owners: Sequence[RequestRef]) -> list[int]:
        """Allocate one reserved page to each owner and return the pages, in the order of the owners."""
        with self.lock:
            taken = [self._take(1, from_reserved=True)[0] for _ in owners]
            for owner, page in zip(owners, taken, strict=True):
                self._owned.setdefault(owner, {})[page] = None
            return taken

    def advertise(self, lease: Lease, pages: int, *, from_reserved: bool = True) -> list[int]:
        """Allocate free pages to a lease; the lease's prefill worker may write to them from now on.

        The pages stay advertised until `adopt`, `quarantine` or `free_lease`.

        Raises StaleEpoch if the lease is already quarantined.
        """
        with self.lock:
            if lease in self._quarantined:
                raise StaleEpoch(f"Lease {lease_name(lease)} has ended; request a new one.")
            taken = self._take(pages, from_reserved)
            if taken:
                self._advertised.setdefault(lease, []).extend(taken)
            return list(taken)

    def adopt(self, lease: Lease, owner: RequestRef) -> list[int]:
        """Transfer a lease's pages to `owner`, and return them in the order in which they were advertised.

        The caller ensures that all writes to them have ended.
        """
        with self.lock:
            pages = self._pop(self._advertised, lease)
            self._owned.setdefault(owner, {}).update(dict.fromkeys(pages))
            return pages

    def quarantine(self, lease: Lease) -> list[int]:
        """Quarantine the pages of an ended lease to which late writes may still arrive.

        `free_quarantined` frees them.
        """
        with self.lock:
            pages = self._pop(self._advertised, lease)
            self._quarantined[lease] = pages
            return list(pages)

    def free_lease(self, lease: Lease) -> int:
        """Free the pages of a lease and return their number.

        The caller guarantees that the prefill worker has released the lease and will not write to the pages again.
        """
        with self.lock:
            return self._make_free(self._pop(self._advertised, lease))

    def free_quarantined(self, lease: Lease) -> int:
        """Free the quarantined pages of a lease and return their number.

        The caller guarantees that the writer is quiescent, or has been dead long enough that no write can arrive.
        """
        with self.lock:
            return self._make_free(self._pop(self._quarantined, lease))

    def free(self, owner: RequestRef, pages: Sequence[int] | None = None) -> int:
        """Free `pages` of the owner and return their number; None = all pages that it owns, if any."""
        with self.lock:
            held = self._owned.get(owner, {})
            return self._make_free(self._disown(owner, list(held) if pages is None else pages))

    def share(self, owner: RequestRef, pages: Sequence[int]) -> None:
        """Turn pages of the owner into shared pages with the caller as their only reader.

        The caller must `release` each of them.
        """
        with self.lock:
            self._shared.update(dict.fromkeys(self._disown(owner, pages), 1))

    def retain(self, pages: Sequence[int]) -> int:
        """Add one reader to each of these shared or cached pages; the reader must `release` each of them.

        A cached page counts as free until it is retained. If too few unreserved pages are left, only the first pages of
        the list are retained. Returns the number of retained pages.
        """
        with self.lock:
            self._need_known(pages, [page for page in pages if page not in self._shared and page not in self._cached])
            # A cached page stops being free when it is retained, so reservations limit how many cached pages may be.
            free = self._unreserved
            for count, page in enumerate(pages):
                if page in self._cached:
                    if not free:
                        return count
                    free -= 1
                    self._cached.remove(page)
                self._shared[page] = self._shared.get(page, 0) + 1
            return len(pages)

    def release(self, pages: Sequence[int]) -> int:
        """Remove one reader from each of these shared pages; return the number of pages that have no readers left.

        Pages without readers become cached. They are evicted in the order in which `pages` lists them.
        """
        with self.lock:
            self._need_known(pages, [page for page in pages if page not in self._shared])
            cached = []
            for page in pages:
                self._shared[page] -= 1
                if self._shared[page] == 0:
                    del self._shared[page]
                    cached.append(page)
            self._cached.add(cached)
            if self._on_cached is not None:
                for page in cached:
                    self._on_cached(page)
            return len(cached)

    def drop_cached(self, pages: Sequence[int]) -> None:
        """Evict cached pages that the prefix index has already removed.

        The eviction callback is not called for them.
        """
        with self.lock:
            self._need_known(pages, [page for page in pages if page not in self._cached])
            for page in pages:
                self._cached.remove(page)
                self._cached.forget(page)
            self._free.give(pages)

    @property
    def total(self) -> int:
        """The number of pages in all states together."""
        return self._total

    @property
    def unreserved(self) -> int:
        """The number of free and cached pages that are not reserved; cheap to read, unlike `counts`."""
        with self.lock:
            return self._unreserved

    def counts(self) -> PageCounts:
        """Return the number of pages in each state, all read at the same moment."""
        with self.lock:
            return self._census().counts()

    def readers(self) -> dict[int, int]:
        """Return the number of readers of each shared and cached page.

        Cached pages, with 0 readers, are in the order in which they will be evicted.
        """
        with self.lock:
            return self._shared | dict.fromkeys(self._cached, 0)

    def check_integrity(self) -> None:
        """Raise Internal, with all faults, unless each page is in exactly one state and all reservations can be met."""
        with self.lock:
            faults = list(self.faults())
        if faults:
            raise Internal(f"The page pool is inconsistent: {'; '.join(faults)}.")

    def faults(self) -> Iterable[str]:
        """Return a sentence for each inconsistency. The caller holds the lock."""
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
            self._reserved,
        )

    def _take(self, pages: int, from_reserved: bool) -> list[int]:
        if from_reserved:
            self._spend(pages)
        else:
            self._need(pages)
        # Cached pages are evicted only now, when the free ones do not suffice: until then a new prompt may still hit
        # them.
        while len(self._free) < pages:
            page = self._cached.pop()
            self._cached.forget(page)
            self._free.give([page])
            self._on_taken(page)
        return self._free.take(pages)

    def _spend(self, pages: int) -> None:
        if not 0 <= pages <= self._reserved:
            raise Internal(f"{pages} reserved pages were spent or given back, {self._reserved} are reserved.")
        self._reserved -= pages

    def _need(self, pages: int) -> None:
        if pages < 0:
            raise Internal(f"{pages} pages were requested.")
        if pages > self._unreserved:
            raise ResourceExhausted(
                f"{pages} KV pages are needed and {self._unreserved} of {self._total} are free; try again soon."
            )

    @property
    def _unreserved(self) -> int:
        """The number of pages that may be allocated without a reservation."""
        return len(self._free) + len(self._cached) - self._reserved

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
            raise StaleEpoch(f"Lease {lease_name(lease)} holds no such pages; it has ended or was never granted here.")
        return leases.pop(lease)

    def _make_free(self, pages: Sequence[int]) -> int:
        self._free.give(pages)
        return len(pages)
