"""Prefix index: which workers have cached which KV pages, and how many leading pages of a prompt each worker has.

Each worker has a slot number, and a set of workers is an integer with one bit per slot, so one look-up covers all
workers.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The number of leading pages of a prompt that each worker has cached. An immutable result of `PrefixIndex.match`.

    `levels` has pairs (number of pages, bit set of workers that hold at least this number), ascending in pages. Each
    worker is in the pair of its number.
    """

    levels: tuple[tuple[int, int], ...] = ()

    def pages(self, slot: int) -> int:
        """Return the number of leading pages that worker `slot` holds."""
        for pages, holders in reversed(self.levels):
            if holders >> slot & 1:
                return pages
        return 0

    def longest(self, count: int, beyond: int = 0) -> list[tuple[int, int]]:
        """Return up to `count` workers that hold the most leading pages, as pairs (slot, pages), most pages first.

        Workers with at most `beyond` pages are left out.
        """
        matches: list[tuple[int, int]] = []
        seen = 0
        for pages, holders in reversed(self.levels):
            if pages <= beyond:
                break
            fresh = holders & ~seen
            seen |= holders
            while fresh and len(matches) < count:
                lowest = fresh & -fresh
                matches.append((lowest.bit_length() - 1, pages))
                fresh ^= lowest
        return matches


class PrefixIndex:
    """Maps page digests (`tandem.protocol.page_digests`) to the workers that have cached the page.

    The fleet owns it; all calls come on the event loop. A worker that holds a page also holds the pages before it,
    because caches evict from the leaves. So the set of holders only shrinks along a prompt, and a look-up needs one
    bisection per change of the set. A worker whose model has state layers reports only the pages at whose ends it has a
    state, and can reuse the prefix up to the last of them: its look-up tries one page after the other. Memory: about
    200 bytes per page; a worker's pages are limited to the size of its pool.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._pages: dict[int, set[bytes]] = {}
        self._limits: dict[int, int] = {}
        self._with_states = 0
        """The workers whose models have state layers, as a bit set."""

    def __len__(self) -> int:
        """Return the number of distinct pages that any worker holds."""
        return len(self._holders)

    def open(self, slot: int, pages_max: int, *, states: bool = False) -> None:
        """Add worker `slot`, which holds no pages yet; `pages_max` is the maximum number of pages that it can hold.

        `states` is True if its model has state layers.
        """
        self._pages[slot] = set()
        self._with_states |= states << slot
        self._limits[slot] = pages_max

    def store(self, slot: int, digests: Iterable[bytes]) -> None:
        """Add pages that worker `slot` has cached; pages beyond its `pages_max` are ignored."""
        pages, limit, bit, holders = self._pages[slot], self._limits[slot], 1 << slot, self._holders
        for digest in digests:
            if digest not in pages and len(pages) < limit:
                pages.add(digest)
                holders[digest] = holders.get(digest, 0) | bit

    def remove(self, slot: int, digests: Iterable[bytes]) -> None:
        """Remove pages of worker `slot`; pages that it does not hold are ignored."""
        pages, bit, holders = self._pages[slot], 1 << slot, self._holders
        for digest in digests:
            if digest in pages:
                pages.discard(digest)
                holders[digest] ^= bit
                if not holders[digest]:
                    del holders[digest]

    def __contains__(self, digest: object) -> bool:
        """Return True if any worker holds the page."""
        return digest in self._holders

    def pages(self, slot: int) -> tuple[bytes, ...]:
        """Return all pages of worker `slot`."""
        return tuple(self._pages[slot])

    def drop(self, slot: int) -> None:
        """Remove worker `slot` and all its pages; the slot may be used again."""
        self.remove(slot, self.pages(slot))
        del self._pages[slot], self._limits[slot]
        self._with_states &= ~(1 << slot)

    def match(self, digests: Sequence[bytes]) -> PrefixMatch:
        """Return how many leading pages of a prompt each worker holds; `digests` names its full pages in order."""
        find, pages = self._holders.get, 0
        levels = self._last_states(digests)
        holders = find(digests[0], 0) & ~self._with_states if digests else 0

        def held_by_fewer(digest: bytes) -> bool:
            return find(digest, 0) & holders != holders

        # Each round finds the leading pages that all remaining workers hold, then drops those without the next page.
        while holders:
            pages = bisect_left(digests, True, pages, key=held_by_fewer)
            levels.append((pages, holders))
            holders = find(digests[pages], 0) & holders if pages < len(digests) else 0
        return PrefixMatch(tuple(sorted(levels)))

    def _last_states(self, digests: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return pairs (number of pages, workers) of the workers with state layers that have their last state there."""
        levels, missing = [], self._with_states
        for pages in range(len(digests), 0, -1):
            if not missing:
                break
            if holders := self._holders.get(digests[pages - 1], 0) & missing:
                levels.append((pages, holders))
                missing &= ~holders
        return levels
