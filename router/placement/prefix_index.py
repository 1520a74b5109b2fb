"""The prefix cache of all workers: which of them hold a KV page, and how many pages of a prompt each holds.

Workers are small numbers (`slot`), sets of them the bits of integers: one look-up serves all workers.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The number of a prompt's first pages that each worker holds.

    `levels` are pairs of pages, rising, and the set of workers that hold at least as many.
    """

    levels: tuple[tuple[int, int], ...] = ()

    def pages(self, slot: int) -> int:
        """Return the pages that worker `slot` holds, from the first on without a gap."""
        for pages, holders in reversed(self.levels):
            if holders >> slot & 1:
                return pages
        return 0

    def longest(self, count: int, beyond: int = 0) -> list[tuple[int, int]]:
        """Return up to `count` workers that hold more than `beyond` pages, with their pages, most first."""
        found: list[tuple[int, int]] = []
        seen = 0
        for pages, holders in reversed(self.levels):
            if pages <= beyond:
                break
            fresh = holders & ~seen
            seen |= holders
            while fresh and len(found) < count:
                lowest = fresh & -fresh
                found.append((lowest.bit_length() - 1, pages))
                fresh ^= lowest
        return found


class PrefixIndex:
    """Maps page names (`tandem.protocol.page_digests`) to the workers that hold the page.

    A worker that holds a page holds the pages before it, as caches evict from the leaves: the holders along a prompt
    only become fewer, and a look-up bisects for each time that they do. Memory: about 200 bytes a page; a worker counts
    for no more pages than its pool has.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._pages: dict[int, set[bytes]] = {}
        self._limits: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of different pages that are held."""
        return len(self._holders)

    def open(self, slot: int, pages_max: int) -> None:
        """Add worker `slot`, which holds nothing yet and never more than `pages_max` pages."""
        self._pages[slot] = set()
        self._limits[slot] = pages_max

    def store(self, slot: int, digests: Iterable[bytes]) -> None:
        """Add pages that worker `slot` holds; more than its pool has are ignored."""
        mine, limit, bit, holders = self._pages[slot], self._limits[slot], 1 << slot, self._holders
        for digest in digests:
            if digest not in mine and len(mine) < limit:
                mine.add(digest)
                holders[digest] = holders.get(digest, 0) | bit

    def remove(self, slot: int, digests: Iterable[bytes]) -> None:
        """Remove pages of worker `slot`; unknown ones are ignored."""
        mine, bit, holders = self._pages[slot], 1 << slot, self._holders
        for digest in digests:
            if digest in mine:
                mine.discard(digest)
                holders[digest] ^= bit
                if not holders[digest]:
                    del holders[digest]

    def clear(self, slot: int) -> None:
        """Forget the pages of worker `slot`, which stays."""
        self.remove(slot, tuple(self._pages[slot]))

    def drop(self, slot: int) -> None:
        """Remove worker `slot` and all that it held; its number may be given again."""
        self.clear(slot)
        del self._pages[slot], self._limits[slot]

    def match(self, digests: Sequence[bytes]) -> PrefixMatch:
        """Return how many of a prompt's full pages `digests` each worker holds."""
        find, levels, pages = self._holders.get, [], 0
        holders = find(digests[0], 0) if digests else 0

        def held_by_fewer(digest: bytes) -> bool:
            return find(digest, 0) & holders != holders

        while holders:
            pages = bisect_left(digests, True, pages, key=held_by_fewer)
            levels.append((pages, holders))
            holders = find(digests[pages], 0) & holders if pages < len(digests) else 0
        return PrefixMatch(tuple(levels))
