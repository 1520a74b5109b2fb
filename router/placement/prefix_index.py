"""Prefix index: which workers have cached which KV pages, and how many leading pages of a prompt each worker has.

A page of a worker is on its device, or only in a tier of its prefix cache, from which the worker would have to load it.
Each worker has a slot number, and a set of workers is an integer with one bit per slot, so one look-up covers all
workers.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tandem.protocol.prefixes import KvTier

Levels = tuple[tuple[int, int], ...]
"""Pairs (number of pages, bit set of workers that hold at least this number), ascending in pages.

Each worker is in the pair of its number.
"""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The number of leading pages of a prompt that each worker has cached. An immutable result of `PrefixIndex.match`.

    `levels` counts the pages on devices. `tiers` counts those in tiers as well; it is empty if no worker has pages in
    tiers only.
    """

    levels: Levels = ()
    tiers: Levels = ()

    def pages(self, slot: int) -> int:
        """Return the number of leading pages that worker `slot` has on its device."""
        for pages, holders in reversed(self.levels):
            if holders >> slot & 1:
                return pages
        return 0

    def longest(self, count: int, beyond: int = 0) -> list[tuple[int, int]]:
        """Return up to `count` workers with the most leading pages on their devices, as pairs (slot, pages).

        They are sorted by their pages, most first. Workers with at most `beyond` pages are left out.
        """
        return _longest(self.levels, count, beyond)

    def longest_with_tiers(self, count: int) -> list[int]:
        """Return up to `count` workers with the most leading pages on their devices or in their tiers, most first."""
        return [slot for slot, _ in _longest(self.tiers, count, 0)]


def _longest(levels: Levels, count: int, beyond: int) -> list[tuple[int, int]]:
    """Return up to `count` workers with more than `beyond` pages, as pairs (slot, pages), most pages first."""
    matches: list[tuple[int, int]] = []
    seen = 0
    for pages, holders in reversed(levels):
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
        """The workers that have each page on their devices, as a bit set."""
        self._in_tiers: dict[bytes, int] = {}
        """The workers that have each page in a tier only, as a bit set."""
        self._pages: dict[int, dict[bytes, KvTier | None]] = {}
        """The pages of each worker with their tiers; None = on the device."""
        self._limits: dict[int, int] = {}
        self._with_states = 0
        """The workers whose models have state layers, as a bit set."""

    def __len__(self) -> int:
        """Return the number of distinct pages that any worker holds."""
        return len(self._holders.keys() | self._in_tiers.keys())

    def open(self, slot: int, pages_max: int, *, states: bool = False) -> None:
        """Add worker `slot`, which holds no pages yet; `pages_max` is the maximum number of pages that it can hold.

        `states` is True if its model has state layers.
        """
        self._pages[slot] = {}
        self._with_states |= states << slot
        self._limits[slot] = pages_max

    def limit(self, slot: int, pages_max: int) -> None:
        """Set the maximum number of pages that worker `slot` can hold, its tiers included."""
        self._limits[slot] = pages_max

    def store(self, slot: int, digests: Iterable[bytes], tier: KvTier | None = None) -> None:
        """Add pages that worker `slot` has in `tier` only, or on its device (None); it may have had them elsewhere.

        Pages beyond its `pages_max` are ignored.
        """
        pages, limit, bit = self._pages[slot], self._limits[slot], 1 << slot
        holders, others = (self._holders, self._in_tiers) if tier is None else (self._in_tiers, self._holders)
        for digest in digests:
            if digest in pages:
                _discard(others, digest, bit)
            elif len(pages) >= limit:
                continue
            pages[digest] = tier
            holders[digest] = holders.get(digest, 0) | bit

    def remove(self, slot: int, digests: Iterable[bytes]) -> None:
        """Remove pages of worker `slot`; pages that it does not hold are ignored."""
        pages, bit = self._pages[slot], 1 << slot
        for digest in digests:
            if digest in pages:
                _discard(self._holders if pages.pop(digest) is None else self._in_tiers, digest, bit)

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
        on_device, in_tiers = self._holders, self._in_tiers
        levels = self._levels(digests, lambda digest: on_device.get(digest, 0))
        if not in_tiers:
            return PrefixMatch(levels)
        # A page in the middle may be missing in tiers, so that this may count too many; `reloads` looks at each page.
        tiers = self._levels(digests, lambda digest: on_device.get(digest, 0) | in_tiers.get(digest, 0))
        return PrefixMatch(levels, tiers)

    def reloads(self, slot: int, digests: Sequence[bytes], resident: int) -> list[tuple[int, dict[KvTier, int]]]:
        """Return what worker `slot` could load of a prompt, of which it has the first `resident` pages on its device.

        Each option is a number of leading pages, and the number of them to be loaded from each tier. The longest one
        is first; the others do without the slowest tiers.
        """
        if self._with_states >> slot & 1:
            return self._reload_of_state(slot, digests, resident)
        held, options, counts = self._pages[slot], list[tuple[int, dict[KvTier, int]]](), dict[KvTier, int]()
        slowest, end = KvTier(1), resident
        for digest in digests[resident:]:
            if digest not in held:
                break
            if (tier := held[digest]) is not None:
                if tier > slowest and counts:
                    options.append((end, dict(counts)))
                slowest, counts[tier] = max(slowest, tier), counts.get(tier, 0) + 1
            end += 1
        if counts:
            options.append((end, counts))
        return options[::-1]

    def _reload_of_state(
        self, slot: int, digests: Sequence[bytes], resident: int
    ) -> list[tuple[int, dict[KvTier, int]]]:
        """Return the option to load the last state, with the pages up to it, which are not reported one by one."""
        held = self._pages[slot]
        for end in range(len(digests), resident, -1):
            if (tier := held.get(digests[end - 1])) is not None:
                return [(end, {tier: end - resident})]
        return []

    def _levels(self, digests: Sequence[bytes], find: Callable[[bytes], int]) -> Levels:
        """Return the number of leading pages of each worker; `find` returns the holders of a page as a bit set."""
        levels, pages = self._last_states(digests, find), 0
        holders = find(digests[0]) & ~self._with_states if digests else 0

        def held_by_fewer(digest: bytes) -> bool:
            return find(digest) & holders != holders

        # Each round finds the leading pages that all remaining workers hold, then drops those without the next page.
        while holders:
            pages = bisect_left(digests, True, pages, key=held_by_fewer)
            levels.append((pages, holders))
            holders = find(digests[pages]) & holders if pages < len(digests) else 0
        return tuple(sorted(levels))

    def _last_states(self, digests: Sequence[bytes], find: Callable[[bytes], int]) -> list[tuple[int, int]]:
        """Return pairs (number of pages, workers) of the workers with state layers that have their last state there."""
        levels, missing = [], self._with_states
        for pages in range(len(digests), 0, -1):
            if not missing:
                break
            if holders := find(digests[pages - 1]) & missing:
                levels.append((pages, holders))
                missing &= ~holders
        return levels


def _discard(holders: dict[bytes, int], digest: bytes, bit: int) -> None:
    """Remove a worker from the holders of a page, if it is one of them."""
    left = holders.get(digest, 0) & ~bit
    if left:
        holders[digest] = left
    else:
        holders.pop(digest, None)
