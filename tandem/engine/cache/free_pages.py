"""The free pages of the pool, kept as extents (runs of adjacent pages), because a run is transferred as one block."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence


class FreePages:
    """A set of free page numbers, stored as extents: maximal runs of adjacent pages.

    Allocation is best fit: the pages of a request come from the smallest extent that holds all of them, so that
    requests for single pages fill the gaps and long extents stay long. If no extent is large enough, the largest one is
    taken whole and the search is repeated for the rest. The cost grows with the number of extents that change, and
    hardly with the number of pages. Not thread-safe: `PagePool`, the owner, calls it under its lock.
    """

    def __init__(self, pages: Iterable[int]) -> None:
        self._count = 0
        self._ends: dict[int, int] = {}
        """Maps the first page of each extent to the page after the extent's last page."""
        self._starts: dict[int, int] = {}
        """Maps the page after the last page of each extent to the extent's first page."""
        self._by_size: list[tuple[int, int]] = []
        """The (size in pages, first page) of each extent, in ascending order."""
        self.give(list(pages))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for size, start in self._by_size:
            yield from range(start, start + size)

    @property
    def extents(self) -> int:
        """The number of extents."""
        return len(self._ends)

    def take(self, count: int) -> list[int]:
        """Remove `count` pages from the set and return them; adjacent pages are returned in order.

        The caller ensures that the set has at least `count` pages.
        """
        taken: list[int] = []
        while len(taken) < count:
            missing = count - len(taken)
            index = min(bisect_left(self._by_size, (missing, -1)), len(self._by_size) - 1)
            size, start = self._by_size[index]
            end = start + min(size, missing)
            taken.extend(range(start, end))
            self._cut(index, end - start)
        self._count -= count
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Add pages in any order; none may be in the set already or occur twice."""
        for start, end in _runs(sorted(pages)):
            self._join(start, end)
        self._count += len(pages)

    def _join(self, start: int, end: int) -> None:
        if start in self._starts:
            before = self._starts[start]
            self._remove(before, start)
            start = before
        if end in self._ends:
            next_end = self._ends[end]
            self._remove(end, next_end)
            end = next_end
        self._add(start, end)

    def _cut(self, index: int, pages: int) -> None:
        """Remove the first `pages` pages of the extent with this index in `_by_size`."""
        size, start = self._by_size[index]
        next_end = self._ends.pop(start)
        if size == pages:
            del self._starts[next_end], self._by_size[index]
            return
        left = size - pages, start + pages
        self._ends[start + pages], self._starts[next_end] = next_end, start + pages
        # The shortened extent mostly keeps its rank by size, so it replaces its old entry without a new search.
        if not index or self._by_size[index - 1] < left:
            self._by_size[index] = left
        else:
            del self._by_size[index]
            insort(self._by_size, left)

    def _add(self, start: int, end: int) -> None:
        self._ends[start] = end
        self._starts[end] = start
        insort(self._by_size, (end - start, start))

    def _remove(self, start: int, end: int) -> None:
        del self._ends[start], self._starts[end]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]


def _runs(ascending: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each run of adjacent pages as its first page and the page after its last."""
    if not ascending:
        return
    start, last = ascending[0], ascending[-1]
    # The common case: all pages form a single run.
    if last - start == len(ascending) - 1:
        yield start, last + 1
        return
    end = start
    for page in ascending:
        if page != end:
            yield start, end
            start = page
        end = page + 1
    yield start, end
