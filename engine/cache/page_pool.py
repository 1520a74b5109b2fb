"""Who owns each page of the KV cache, and how many pages are promised.

A page is in exactly one state:

    free         nobody's; the pool alone hands it out
    owned        one attempt's at one request: it alone writes the page, and its scheduler frees it
    shared       read-only and counted: each `retain` is undone by one `release`, the last of which frees it
    advertised   a lease's: the prefill worker named there may write it at any moment, nobody else touches it
    quarantined  a dead lease's whose late writes may still land: free again only by `free_quarantined`

A promise is a credit without pages: it keeps so many free pages from everyone who has none.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wire.errors import Internal, ResourceExhausted, StaleEpoch
from wire.messages import Lease, RequestRef


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; `promised` is the part of `free` that is spoken for."""

    total: int
    free: int
    owned: int
    shared: int
    advertised: int
    quarantined: int
    promised: int


class PagePool:
    """The pages 0 .. total - 1. Every method is safe from any thread, takes microseconds and changes all or nothing.

    ResourceExhausted means no room now; StaleEpoch, that a lease holds no such pages (any more); Internal, that the
    caller named pages it does not own: a defect.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._lock = threading.Lock()
        # Taken from the end: the page freed last is the one the CPU's caches know best.
        self._free = list(range(total - 1, -1, -1))
        self._promised = 0
        self._owned: dict[RequestRef, dict[int, None]] = {}
        self._shared: dict[int, int] = {}
        self._advertised: dict[Lease, list[int]] = {}
        self._quarantined: dict[Lease, list[int]] = {}

    def promise(self, pages: int) -> None:
        """Keeps `pages` free pages back for whoever spends the promise; undone by `unpromise` or spent page by page."""
        with self._lock:
            self._need(pages, len(self._free) - self._promised)
            self._promised += pages

    def unpromise(self, pages: int) -> None:
        """Gives back what is left of a promise; the caller keeps that count."""
        with self._lock:
            self._spend(pages)

    def allocate(self, owner: RequestRef, pages: int, *, from_promise: bool = False) -> list[int]:
        """Free pages become the owner's, who frees them by `free`; a promise made before pays with `from_promise`."""
        with self._lock:
            taken = self._take(pages, from_promise)
            if taken:
                self._owned.setdefault(owner, {}).update(dict.fromkeys(taken))
            return taken

    def advertise(self, lease: Lease, pages: int, *, from_promise: bool = True) -> list[int]:
        """Free pages become the lease's, for its prefill worker to write.

        Ended by `adopt`, `quarantine` or `free_lease`.
        """
        with self._lock:
            if lease in self._quarantined:
                raise StaleEpoch(f"Lease {_named(lease)} is over; ask for a new one.")
            taken = self._take(pages, from_promise)
            if taken:
                self._advertised.setdefault(lease, []).extend(taken)
            return list(taken)

    def adopt(self, lease: Lease, owner: RequestRef) -> list[int]:
        """The lease's pages are written and quiet: they become the owner's, in the order they were advertised."""
        with self._lock:
            pages = self._pop(self._advertised, lease)
            self._owned.setdefault(owner, {}).update(dict.fromkeys(pages))
            return pages

    def quarantine(self, lease: Lease) -> list[int]:
        """The lease is over and late writes may still land: nobody gets its pages until `free_quarantined`."""
        with self._lock:
            pages = self._pop(self._advertised, lease)
            self._quarantined[lease] = pages
            return list(pages)

    def free_lease(self, lease: Lease) -> int:
        """Frees advertised pages that nobody writes or will write: the prefill worker said so. Returns how many."""
        with self._lock:
            return self._give_back(self._pop(self._advertised, lease))

    def free_quarantined(self, lease: Lease) -> int:
        """Frees quarantined pages once their writer is known to be quiet, or dead for long enough. Returns how many."""
        with self._lock:
            return self._give_back(self._pop(self._quarantined, lease))

    def free(self, owner: RequestRef, pages: Sequence[int] | None = None) -> int:
        """Frees these pages of the owner, or all it has (perhaps none). Returns how many."""
        with self._lock:
            held = self._owned.get(owner, {})
            return self._give_back(self._disown(owner, list(held) if pages is None else pages))

    def share(self, owner: RequestRef, pages: Sequence[int]) -> None:
        """The owner's pages become shared with a count of 1, which the caller now holds and must `release`."""
        with self._lock:
            self._shared.update(dict.fromkeys(self._disown(owner, pages), 1))

    def retain(self, pages: Sequence[int]) -> None:
        """One more reader of each shared page; each must `release`."""
        with self._lock:
            self._need_shared(pages)
            for page in pages:
                self._shared[page] += 1

    def release(self, pages: Sequence[int]) -> int:
        """One reader less of each shared page; pages without readers are free. Returns how many were freed."""
        with self._lock:
            self._need_shared(pages)
            unread = []
            for page in pages:
                self._shared[page] -= 1
                if self._shared[page] == 0:
                    del self._shared[page]
                    unread.append(page)
            return self._give_back(unread)

    def counts(self) -> PageCounts:
        """Pages by state, all of one moment."""
        with self._lock:
            return PageCounts(
                total=self._total,
                free=len(self._free),
                owned=_sum(self._owned.values()),
                shared=len(self._shared),
                advertised=_sum(self._advertised.values()),
                quarantined=_sum(self._quarantined.values()),
                promised=self._promised,
            )

    def check_integrity(self) -> None:
        """Raises Internal, in words, unless every page is in exactly one state and the promises can be kept."""
        with self._lock:
            faults = list(self._faults())
        if faults:
            raise Internal(f"The page pool is inconsistent: {'; '.join(faults)}.")

    def _faults(self) -> Iterable[str]:
        places: dict[int, list[str]] = {page: [] for page in range(self._total)}
        for place, page in self._places():
            places.setdefault(page, []).append(place)
        for page, found in places.items():
            if not 0 <= page < self._total:
                yield f"page {page} ({found[0]}) is not one of {self._total}"
            elif not found:
                yield f"page {page} is lost: in no state"
            elif len(found) > 1:
                yield f"page {page} is in {len(found)} states: {', '.join(found)}"
        if not 0 <= self._promised <= len(self._free):
            yield f"{self._promised} pages are promised and {len(self._free)} are free"
        yield from (f"shared page {page} has {count} readers" for page, count in self._shared.items() if count < 1)

    def _places(self) -> Iterable[tuple[str, int]]:
        yield from (("free", page) for page in self._free)
        yield from (("shared", page) for page in self._shared)
        for owner, held in self._owned.items():
            yield from ((f"owned by {owner.request_id}#{owner.attempt}", page) for page in held)
        for state, leases in (("advertised", self._advertised), ("quarantined", self._quarantined)):
            for lease, pages in leases.items():
                yield from ((f"{state} under {_named(lease)}", page) for page in pages)

    def _take(self, pages: int, from_promise: bool) -> list[int]:
        if from_promise:
            self._spend(pages)
        else:
            self._need(pages, len(self._free) - self._promised)
        return [self._free.pop() for _ in range(pages)]

    def _spend(self, pages: int) -> None:
        if not 0 <= pages <= self._promised:
            raise Internal(f"{pages} promised pages were spent or given back, {self._promised} are promised.")
        self._promised -= pages

    def _need(self, pages: int, there: int) -> None:
        if pages < 0:
            raise Internal(f"{pages} pages were asked for.")
        if pages > there:
            raise ResourceExhausted(
                f"{pages} KV pages are needed and {there} of {self._total} are free; try again soon."
            )

    def _need_shared(self, pages: Sequence[int]) -> None:
        strangers = [page for page in pages if page not in self._shared]
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
            raise StaleEpoch(f"Lease {_named(lease)} holds no such pages; it is over or was never granted here.")
        return leases.pop(lease)

    def _give_back(self, pages: Sequence[int]) -> int:
        self._free.extend(pages)
        return len(pages)


def _named(lease: Lease) -> str:
    return f"{lease.request_id}#{lease.attempt} (epoch {lease.epoch})"


def _sum(held: Iterable[Sequence[int] | dict[int, None]]) -> int:
    return sum(len(pages) for pages in held)
