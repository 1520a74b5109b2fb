"""The order in which cached pages are evicted: least recently used first, and pages that are kept after all others.

A page is kept until a time that a client's hint or the router's estimate gives (`mark`). Kept pages of a tenant are
limited to its share of the pool: beyond it, those whose time ends first become ordinary pages. So a tenant can prefer
some of its pages to others of its own, and cannot take the cache from other tenants by marking all of them.

Pages of a prefix are evicted from its end. This holds for kept pages, too, because the owner marks the whole path up to
a page at once: no page has an earlier time than the pages after it.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

_SLACK = 64
"""Number of outdated entries of a heap beyond the valid ones, above which the heap is rebuilt."""


class _Kept(NamedTuple):
    """A cached page that is kept; entries of one end time are in the order in which the pages were cached."""

    until: float
    order: int
    page: int
    tenant: str


class EvictionOrder(Collection[int]):
    """The cached pages of a pool, which nobody reads, in the order of their eviction. Guarded by the pool's lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Create an empty order; `clock` returns the time in seconds."""
        self._clock = clock
        self._ordinary: OrderedDict[int, None] = OrderedDict()
        self._kept: dict[int, _Kept] = {}
        self._by_time: list[_Kept] = []
        """A heap of the kept pages; entries that are not in `_kept` are outdated."""
        self._of_tenant: dict[str, dict[int, None]] = {}
        """The kept pages of each tenant that has any."""
        self._queues: dict[str, list[_Kept]] = {}
        """A heap like `_by_time` of each of these tenants."""
        self._marks: dict[int, tuple[float, str]] = {}
        """The end time and the tenant of each page that was marked, cached or not."""
        self._added = 0
        self.share: Callable[[], int] = lambda: 0
        """Returns the maximum number of kept pages of one tenant."""
        self._share = 0
        """The maximum that all tenants are known to keep to."""

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._kept)

    def __contains__(self, page: object) -> bool:
        return page in self._ordinary or page in self._kept

    def __iter__(self) -> Iterator[int]:
        """Iterate over all pages; kept ones come last, those whose time ends first before others."""
        yield from self._ordinary
        yield from (kept.page for kept in sorted(self._kept.values()))

    def mark(self, pages: Iterable[int], tenant: str, seconds: float) -> None:
        """Keep these pages for `seconds` from now on, once they are cached; an earlier mark is never shortened.

        The caller marks with each page all pages before it in its prefix.
        """
        until = self._clock() + seconds
        for page in pages:
            known, _ = self._marks.get(page, (0.0, ""))
            self._marks[page] = max(known, until), tenant

    def add(self, pages: Iterable[int]) -> None:
        """Add pages that nobody reads any longer; of the pages of one prefix, the last ones come first."""
        now = self._clock()
        self._expire(now)
        for page in pages:
            until, tenant = self._marks.get(page, (0.0, ""))
            if until <= now:
                self._ordinary[page] = None
                continue
            self._added += 1
            kept = self._kept[page] = _Kept(until, self._added, page, tenant)
            self._of_tenant.setdefault(tenant, {})[page] = None
            self._push(self._by_time, kept, len(self._kept))
            self._push(self._queues.setdefault(tenant, []), kept, len(self._of_tenant[tenant]))
            self._limit(tenant, self.share())

    def remove(self, page: int) -> None:
        """Remove a page that is read again or has been evicted. Raises KeyError if it is not in the order."""
        kept = self._kept.pop(page, None)
        if kept is None:
            del self._ordinary[page]
            return
        of_tenant = self._of_tenant[kept.tenant]
        del of_tenant[page]
        if not of_tenant:
            del self._of_tenant[kept.tenant], self._queues[kept.tenant]

    def forget(self, page: int) -> None:
        """Remove the mark of a page whose contents are gone."""
        self._marks.pop(page, None)

    def pop(self) -> int:
        """Remove and return the page to evict next. The caller ensures that there is one."""
        self._expire(self._clock())
        share = self.share()
        if share < self._share:
            # A tenant has joined: the others may have more kept pages than their share is now.
            for tenant in list(self._of_tenant):
                self._limit(tenant, share)
        self._share = share
        if not self._ordinary:
            most = max(self._of_tenant, key=lambda tenant: len(self._of_tenant[tenant]))
            self._demote(self._first(self._queues[most]))
        page, _ = self._ordinary.popitem(last=False)
        return page

    def _expire(self, now: float) -> None:
        while self._kept and (first := self._first(self._by_time)).until <= now:
            self._demote(first)

    def _limit(self, tenant: str, share: int) -> None:
        while len(self._of_tenant.get(tenant, ())) > share:
            self._demote(self._first(self._queues[tenant]))

    def _push(self, heap: list[_Kept], kept: _Kept, valid: int) -> None:
        heapq.heappush(heap, kept)
        if len(heap) > 2 * valid + _SLACK:
            heap[:] = [entry for entry in heap if self._kept.get(entry.page) is entry]
            heapq.heapify(heap)

    def _first(self, heap: list[_Kept]) -> _Kept:
        """Return the kept page whose time ends first; the caller ensures that the heap has a valid entry."""
        while self._kept.get(heap[0].page) is not heap[0]:
            heapq.heappop(heap)
        return heap[0]

    def _demote(self, kept: _Kept) -> None:
        """Turn a kept page into the ordinary page that is evicted last."""
        self.remove(kept.page)
        self._ordinary[kept.page] = None
