"""Which workers hold which KV pages that can be used again, and how much of a prompt each of them holds.

Workers are small numbers here (`slot`), their sets are the bits of integers: a look-up answers for all workers at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How many of a prompt's first pages each worker holds.

    `levels` are (pages, workers that hold as many or more), the pages growing, the workers becoming fewer.
    """

    levels: tuple[tuple[int, int], ...] = ()

    def pages(self, slot: int) -> int:
        """Pages that worker `slot` holds, from the first on without a gap."""
        for pages, holders in reversed(self.levels):
            if holders >> slot & 1:
                return pages
        return 0

    def longest(self, count: int, beyond: int = 0) -> list[tuple[int, int]]:
        """Up to `count` workers that hold more than `beyond` pages and how many these are, most first."""
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


NO_MATCH = PrefixMatch()
_STRIDES = 8
"""How much longer each stride along a prompt is than the one before."""


class PrefixIndex:
    """Page names (`wire.page_digests`) → the workers that hold the page.

    A worker that holds a page holds the pages before it: caches give pages up from the leaves. So the holders along a
    prompt only become fewer, and a look-up needs a few probes for each time that they do, however long the prompt is.
    Memory: about 200 bytes a page, and a worker counts for no more pages than its pool has.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._pages: dict[int, set[bytes]] = {}
        self._limits: dict[int, int] = {}

    def __len__(self) -> int:
        """Different pages that anybody holds."""
        return len(self._holders)

    def open(self, slot: int, pages_max: int) -> None:
        """Worker `slot` is there, holds nothing yet and never more than `pages_max` pages."""
        self._pages[slot] = set()
        self._limits[slot] = pages_max

    def held(self, slot: int) -> int:
        """Pages that worker `slot` holds."""
        return len(self._pages.get(slot, ()))

    def store(self, slot: int, digests: Iterable[bytes]) -> None:
        """Worker `slot` holds these pages from now on; what is more than its pool has is ignored."""
        mine, limit, bit, holders = self._pages[slot], self._limits[slot], 1 << slot, self._holders
        for digest in digests:
            if digest not in mine and len(mine) < limit:
                mine.add(digest)
                holders[digest] = holders.get(digest, 0) | bit

    def remove(self, slot: int, digests: Iterable[bytes]) -> None:
        """Worker `slot` no longer holds these; unknown ones are ignored."""
        mine = self._pages[slot]
        for digest in digests:
            if digest in mine:
                mine.discard(digest)
                self._forget(digest, slot)

    def drop(self, slot: int) -> None:
        """Worker `slot` is gone: nothing of it stays, and its number may be another's."""
        for digest in self._pages.pop(slot, ()):
            self._forget(digest, slot)
        self._limits.pop(slot, None)

    def clear(self, slot: int) -> None:
        """Worker `slot` is there and holds nothing that is known."""
        limit = self._limits[slot]
        self.drop(slot)
        self.open(slot, limit)

    def match(self, digests: Sequence[bytes]) -> PrefixMatch:
        """How much of the prompt whose full pages are `digests` each worker holds."""
        find, last, levels = self._holders.get, len(digests) - 1, []
        known, stride = 0, 1
        holders = find(digests[0], 0) if digests else 0
        beyond: list[tuple[int, int]] = []
        """Pages behind `known` that fewer hold, and who; the nearest is the last."""
        while holders:
            while not beyond and known < last:
                page, stride = min(known + stride, last), _STRIDES * stride
                found = find(digests[page], 0) & holders
                if found == holders:
                    known = page
                else:
                    beyond.append((page, found))
            if not beyond:
                levels.append((last + 1, holders))
                break
            end, fewer = beyond[-1]
            while known + 1 < end:
                page = (known + end) // 2
                found = find(digests[page], 0) & holders
                if found == holders:
                    known = page
                elif found == fewer:
                    end = page
                else:
                    end, fewer = page, found
                    beyond.append((page, found))
            levels.append((end, holders))
            known, holders = beyond.pop()
        return PrefixMatch(tuple(levels)) if levels else NO_MATCH

    def _forget(self, digest: bytes, slot: int) -> None:
        left = self._holders[digest] & ~(1 << slot)
        if left:
            self._holders[digest] = left
        else:
            del self._holders[digest]
