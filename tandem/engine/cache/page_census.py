"""Counts the pages of the pool in each state, and checks that each page is in exactly one state."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from tandem.engine.cache.free_pages import FreePages
from tandem.protocol.messages import Lease, RequestRef


@dataclass(frozen=True, slots=True)
class PageCounts:
    """The number of pages in each state.

    `reserved` pages are also counted in `free` or `cached`.
    """

    total: int
    free: int
    owned: int
    shared: int
    cached: int
    advertised: int
    quarantined: int
    reserved: int


@dataclass(frozen=True, slots=True)
class PageCensus:
    """A view of the pool's bookkeeping, created and read under the pool's lock.

    It refers to the pool's own containers and copies nothing.
    """

    total: int
    free: FreePages
    owned: Mapping[RequestRef, Collection[int]]
    shared: Mapping[int, int]
    """The number of readers of each shared page, by page number."""
    cached: Collection[int]
    advertised: Mapping[Lease, Collection[int]]
    quarantined: Mapping[Lease, Collection[int]]
    reserved: int

    def counts(self) -> PageCounts:
        """Return the number of pages in each state."""
        return PageCounts(
            total=self.total,
            free=len(self.free),
            owned=_sum(self.owned.values()),
            shared=len(self.shared),
            cached=len(self.cached),
            advertised=_sum(self.advertised.values()),
            quarantined=_sum(self.quarantined.values()),
            reserved=self.reserved,
        )

    def faults(self) -> Iterator[str]:
        """Yield a sentence for each inconsistency.

        An inconsistency is a page in no state or in several states, a shared page without readers, or more reserved
        pages than free and cached pages together.
        """
        places: dict[int, list[str]] = {page: [] for page in range(self.total)}
        for place, page in self._places():
            places.setdefault(page, []).append(place)
        for page, states in places.items():
            if not 0 <= page < self.total:
                yield f"page {page} ({states[0]}) is not one of {self.total}"
            elif not states:
                yield f"page {page} is lost: in no state"
            elif len(states) > 1:
                yield f"page {page} is in {len(states)} states: {', '.join(states)}"
        there = len(self.free) + len(self.cached)
        if not 0 <= self.reserved <= there:
            yield f"{self.reserved} pages are reserved and {there} are free"
        yield from (f"shared page {page} has {count} readers" for page, count in self.shared.items() if count < 1)

    def _places(self) -> Iterator[tuple[str, int]]:
        yield from (("free", page) for page in self.free)
        yield from (("shared", page) for page in self.shared)
        yield from (("cached", page) for page in self.cached)
        for owner, held in self.owned.items():
            yield from ((f"owned by {owner.request_id}#{owner.attempt}", page) for page in held)
        for state, leases in (("advertised", self.advertised), ("quarantined", self.quarantined)):
            for lease, pages in leases.items():
                yield from ((f"{state} under {lease_name(lease)}", page) for page in pages)


def lease_name(lease: Lease) -> str:
    """Return a readable name of a lease, for error messages."""
    return f"{lease.request_id}#{lease.attempt} (epoch {lease.epoch})"


def _sum(held: Iterable[Collection[int]]) -> int:
    return sum(len(pages) for pages in held)
