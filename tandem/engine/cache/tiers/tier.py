"""The interface of a tier of the prefix cache: it stores KV pages by digest outside the page pool, and returns them.

A tier has a capacity in bytes, and evicts the least recently used page first. The pages of a group of state layers
(snapshots of states) are stored like all others: a tier knows nothing of what is in a page.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from tandem.engine.cache.page_key import PageKey
from tandem.protocol.prefixes import KvTier

Location = TypeVar("Location")


class StoredPage(NamedTuple):
    """A page that a tier has returned."""

    data: Tensor
    """The bytes of the page, [page bytes] uint8, in host memory. They are valid until the next call of `store`."""
    checksum: int
    """The checksum of the page (`tandem/engine/cache/page_checksums.py`) from the time when it was stored."""


Fill = Callable[[Sequence[Tensor]], Sequence[int | None]]
"""Copies pages into buffers [page bytes] uint8 and returns the checksum of each page; None = the page is not stored."""


@dataclass(slots=True)
class TierCounts:
    """The counters of a tier since the worker started."""

    stored_pages: int = 0
    loaded_pages: int = 0
    """The number of pages that were copied back into the page pool and whose checksums were right."""
    evicted_pages: int = 0
    corrupt_pages: int = 0
    """The number of pages whose checksum was wrong when they were loaded. They were deleted, and computed again."""
    failures: int = 0
    """The number of reads and writes that failed, for example because the disk is full or was unmounted."""
    stored_s: float = 0.0
    """The total time in seconds that it took to store pages; it includes that of the next tier, which stores others."""
    loaded_s: float = 0.0
    """The total time in seconds that it took to load pages, copies into the page pool and checksums included."""


class Tier(ABC, Generic[Location]):
    """A store of KV pages of equal size, in the order of their last use.

    Only one thread may call the methods, but any thread may test for membership (`key in tier`) and read the counts.
    """

    def __init__(self, tier: KvTier, capacity_bytes: int, page_bytes: int) -> None:
        self.tier = tier
        self.name = tier.name.lower()
        self.page_bytes = page_bytes
        self.capacity = capacity_bytes // page_bytes
        """The maximum number of pages."""
        self.counts = TierCounts()
        self.next_tier: Tier[Any] | None = None
        """The tier that gets the pages which this one evicts; None if there is none. Set when both are open."""
        self.on_change: Callable[[PageKey], None] = lambda _: None
        """Called after a page was stored or deleted."""
        self._pages: OrderedDict[PageKey, Location] = OrderedDict()
        """The location of each stored page, the least recently used page first."""

    def __contains__(self, key: PageKey) -> bool:
        return key in self._pages

    def __len__(self) -> int:
        """Return the number of stored pages."""
        return len(self._pages)

    def stored_keys(self) -> list[PageKey]:
        """Return the keys of all stored pages."""
        return list(self._pages)

    def _put(self, key: PageKey, location: Location) -> None:
        self._pages[key] = location
        self.on_change(key)

    def _pop(self, key: PageKey) -> Location | None:
        """Remove a page from the index; return its location, or None if it is not stored."""
        location = self._pages.pop(key, None)
        if location is not None:
            self.on_change(key)
        return location

    def touch(self, key: PageKey) -> None:
        """Make a page the most recently used one, if it is stored."""
        if key in self._pages:
            self._pages.move_to_end(key)

    def open(self) -> None:
        """Allocate the memory of the tier, or find the pages that an earlier process has stored. Called once, first."""

    def save(self, keys: Sequence[PageKey], fill: Fill) -> None:
        """Store pages (`store`), and measure the time."""
        began = time.monotonic()
        self.store(keys, fill)
        self.counts.stored_s += time.monotonic() - began

    @abstractmethod
    def store(self, keys: Sequence[PageKey], fill: Fill) -> None:
        """Store pages that are not stored yet, and evict others if there is no room.

        `fill` is called once or several times, for successive parts of `keys`. A failure is counted, and the page is
        left out.
        """

    def write_ahead(self) -> bool:
        """Store one page in the next tier before it is evicted; return False if the next tier has all pages."""
        return False

    @abstractmethod
    def read(self, key: PageKey) -> StoredPage | None:
        """Return a stored page and make it the most recently used one; None if it is missing or cannot be read."""

    @abstractmethod
    def discard(self, key: PageKey) -> None:
        """Delete a page, if it is stored."""

    def close(self) -> None:
        """Free the memory of the tier. No other method is called afterwards."""


@dataclass(slots=True)
class MeasuredRate:
    """The measured rate of a tier in bytes per second, from the loads of the last `FORGET_S` seconds.

    Older loads are forgotten, so that a tier that was slow for a while is tried again.
    """

    FORGET_S = 60.0
    _loads: list[tuple[float, int, float]] = field(default_factory=list)
    """The end of each load, by the clock of the caller, its bytes and its seconds."""

    def add(self, now: float, size: int, seconds: float) -> None:
        """Add a load that returned `size` bytes, took `seconds` and ended at the time `now`."""
        self._loads = [load for load in self._loads if load[0] > now - self.FORGET_S]
        self._loads.append((now, size, seconds))

    def seconds(self, size: int, now: float) -> float:
        """Return the seconds to load `size` bytes at the time `now`.

        0 without a load, so that a first load measures the rate; infinite if all loads have failed.
        """
        newest = [(loaded, spent_s) for end, loaded, spent_s in self._loads if end > now - self.FORGET_S]
        spent_s, total = sum(spent for _, spent in newest), sum(loaded for loaded, _ in newest)
        if not size or not spent_s:
            return 0.0
        return size * spent_s / total if total else math.inf
