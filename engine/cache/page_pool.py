"""Who owns each page of the KV cache, and how many pages are promised.

A page is in exactly one state:

    free         nobody's; the pool alone hands it out
    owned        one attempt's at one request: it alone writes the page, and its scheduler frees it
    shared       read-only and counted: each `retain` is undone by one `release`, after the last of which it is cached
    cached       nobody reads it, but the prefix cache knows what it holds: room that is still worth something
    advertised   a lease's: the prefill worker named there may write it at any moment, nobody else touches it
    quarantined  a dead lease's whose late writes may still land: free again only by `free_quarantined`

A promise is a credit without pages: it keeps so many free pages from everyone who has none.

Cached pages are room like free ones, and are taken when none of those is left, the one that was read longest ago
first: nobody is ever refused because of them.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from engine.cache.free_pages import FreePages
from engine.cache.page_census import PageCensus, PageCounts, lease_name
from wire.errors import Internal, ResourceExhausted, StaleEpoch
from wire.messages import Lease, RequestRef


class PagePool:
    """The pages 0 .. total - 1. Every method is safe from any thread, takes microseconds and changes all or nothing.

    ResourceExhausted means no room now; StaleEpoch, that a lease holds no such pages (any more); Internal, that the
    caller named pages it does not own: a defect.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self.lock = threading.RLock()
        """For who must do several things at once: nothing changes while it is held. Held for microseconds."""
        self._free = FreePages(range(total))
        self._promised = 0
        self._owned: dict[RequestRef, dict[int, None]] = {}
        self._shared: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._on_taken: Callable[[int], None] = lambda _page: None
        self._advertised: dict[Lease, list[int]] = {}
        self._quarantined: dict[Lease, list[int]] = {}

    def tell_of_taken(self, on_taken: Callable[[int], None]) -> None:
        """`on_taken(page)` hears, under the lock, of each cached page that is about to hold something else."""
        self._on_taken = on_taken

    def promise(self, pages: int) -> None:
        """Keeps `pages` free pages back for whoever spends the promise; undone by `unpromise` or spent page by page."""
        with self.lock:
            self._need(pages)
            self._promised += pages

    def promise_up_to(self, pages: int) -> int:
        """Promise `pages` pages, or as many as there are. Returns how many."""
        with self.lock:
            promised = max(0, min(pages, self._room))
            self._promised += promised
            return promised

    def unpromise(self, pages: int) -> None:
        """Gives back what is left of a promise; the caller keeps that count."""
        with self.lock:
            self._spend(pages)

    def allocate(self, owner: RequestRef, pages: int, *, from_promise: bool = False) -> list[int]:
        """Free pages become the owner's, who frees them by `free`; a promise made before pays with `from_promise`."""
        with self.lock:
            taken = self._take(pages, from_promise)
            if taken:
                self._owned.setdefault(owner, {}).update(dict.fromkeys(taken))
            return taken

    def allocate_each(self, owners: Sequence[RequestRef]) -> list[int]:
        """A promised page for each of them, as `allocate` gives them one by one."""
        with self.lock:
            taken = [self._take(1, from_promise=True)[0] for _ in owners]
            for owner, page in zip(owners, taken, strict=True):
                self._owned.setdefault(owner, {})[page] = None
            return taken

    def advertise(self, lease: Lease, pages: int, *, from_promise: bool = True) -> list[int]:
        """Free pages become the lease's, for its prefill worker to write.

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
        """The lease's pages are written and quiet: they become the owner's, in the order they were advertised."""
        with self.lock:
            pages = self._pop(self._advertised, lease)
            self._owned.setdefault(owner, {}).update(dict.fromkeys(pages))
            return pages

    def quarantine(self, lease: Lease) -> list[int]:
        """The lease is over and late writes may still land: nobody gets its pages until `free_quarantined`."""
        with self.lock:
            pages = self._pop(self._advertised, lease)
            self._quarantined[lease] = pages
            return list(pages)

    def free_lease(self, lease: Lease) -> int:
        """Frees advertised pages that nobody writes or will write: the prefill worker said so. Returns how many."""
        with self.lock:
            return self._give_back(self._pop(self._advertised, lease))

    def free_quarantined(self, lease: Lease) -> int:
        """Frees quarantined pages once their writer is known to be quiet, or dead for long enough. Returns how many."""
        with self.lock:
            return self._give_back(self._pop(self._quarantined, lease))

    def free(self, owner: RequestRef, pages: Sequence[int] | None = None) -> int:
        """Frees these pages of the owner, or all it has (perhaps none). Returns how many."""
        with self.lock:
            held = self._owned.get(owner, {})
            return self._give_back(self._disown(owner, list(held) if pages is None else pages))

    def share(self, owner: RequestRef, pages: Sequence[int]) -> None:
        """The owner's pages become shared, read by the caller, who must `release` each."""
        with self.lock:
            self._shared.update(dict.fromkeys(self._disown(owner, pages), 1))

    def retain(self, pages: Sequence[int]) -> int:
        """One more reader of each of these shared or cached pages, who must `release` it. A cached page is room no
        longer: only as many of the first pages are retained as promises leave room for. Returns how many.
        """
        with self.lock:
            self._need_known(pages, [page for page in pages if page not in self._shared and page not in self._cached])
            room = self._room
            for count, page in enumerate(pages):
                if page in self._cached:
                    if not room:
                        return count
                    room -= 1
                    del self._cached[page]
                self._shared[page] = self._shared.get(page, 0) + 1
            return len(pages)

    def release(self, pages: Sequence[int]) -> int:
        """One reader less of each shared page; those without readers are cached, the first of them to be taken first.

        Returns how many those are.
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

    @property
    def total(self) -> int:
        """Pages in all states."""
        return self._total

    @property
    def room(self) -> int:
        """Pages that nobody uses and that are promised to nobody; of the counts, what costs nothing to know."""
        with self.lock:
            return self._room

    def counts(self) -> PageCounts:
        """Pages by state, all of one moment."""
        with self.lock:
            return self._census().counts()

    def readers(self) -> dict[int, int]:
        """How many read each shared or cached page; cached ones, which nobody reads, in the order they are taken."""
        with self.lock:
            return self._shared | dict.fromkeys(self._cached, 0)

    def check_integrity(self) -> None:
        """Raises Internal, in words, unless every page is in exactly one state and the promises can be kept."""
        with self.lock:
            faults = list(self.faults())
        if faults:
            raise Internal(f"The page pool is inconsistent: {'; '.join(faults)}.")

    def faults(self) -> Iterable[str]:
        """What is wrong, in words; under the lock."""
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
        missing = max(0, pages - len(self._free))
        for page in [self._cached.popitem(last=False)[0] for _ in range(missing)]:
            self._on_taken(page)
            self._free.give([page])
        return self._free.take(pages)

    def _spend(self, pages: int) -> None:
        if not 0 <= pages <= self._promised:
            raise Internal(f"{pages} promised pages were spent or given back, {self._promised} are promised.")
        self._promised -= pages

    def _need(self, pages: int) -> None:
        if pages < 0:
            raise Internal(f"{pages} pages were asked for.")
        if pages > self._room:
            raise ResourceExhausted(
                f"{pages} KV pages are needed and {self._room} of {self._total} are free; try again soon."
            )

    @property
    def _room(self) -> int:
        """Pages that may be handed out without a promise."""
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
