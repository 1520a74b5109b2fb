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
        find, levels, first = self._holders.get, [], 0
        everybody = -1
        while first < len(digests):
            holders = find(digests[first], 0) & everybody
            if not holders:
                break
            first = self._last_alike(digests, first, holders) + 1
            levels.append((first, holders))
            everybody = holders
        return PrefixMatch(tuple(levels)) if levels else NO_MATCH

    def _last_alike(self, digests: Sequence[bytes], known: int, holders: int) -> int:
        """The last page that all of `holders` hold, who hold page `known`: in strides that double, then by halves."""
        find, last, stride = self._holders.get, len(digests) - 1, 1
        beyond = last + 1
        while known < last:
            probe = min(known + stride, last)
            if find(digests[probe], 0) & holders != holders:
                beyond = probe
                break
            known, stride = probe, 2 * stride
        while known + 1 < beyond:
            middle = (known + beyond) // 2
            if find(digests[middle], 0) & holders == holders:
                known = middle
            else:
                beyond = middle
        return known

    def _forget(self, digest: bytes, slot: int) -> None:
        left = self._holders[digest] & ~(1 << slot)
        if left:
            self._holders[digest] = left
        else:
            del self._holders[digest]
