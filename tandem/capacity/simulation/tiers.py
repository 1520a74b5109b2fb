"""Tiers of a simulated worker: the real ones, but without contents, and with a rate instead of a memory or a disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.capacity.simulation.clock import VirtualClock
from tandem.capacity.simulation.spec import TierSpec
from tandem.engine.cache.page_key import PageKey
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.engine.cache.tiers.cache_tiers import BATCH, CacheTiers
from tandem.engine.cache.tiers.page_copies import PageCopies
from tandem.engine.cache.tiers.tier import Fill, StoredPage, Tier

_EMPTY = torch.empty(0, dtype=torch.uint8)


class VirtualTier(Tier[bool]):
    """A tier that knows which pages it has, without their contents."""

    def __init__(self, spec: TierSpec, page_bytes: int) -> None:
        super().__init__(spec.tier, spec.capacity_bytes, page_bytes)
        self.page_s = page_bytes / spec.bytes_per_s
        """Seconds to load or save a page."""

    def store(self, keys: Sequence[PageKey], fill: Fill) -> None:
        """Store pages (`Tier.store`); evicted pages move to the next tier."""
        for key, checksum in zip(keys, fill([_EMPTY] * len(keys)), strict=True):
            if checksum is None:
                continue
            while len(self) >= self.capacity:
                self._evict(next(iter(self._pages)))
            self._put(key, True)
            self.counts.stored_pages += 1

    def _evict(self, key: PageKey) -> None:
        if self.next_tier is not None and key not in self.next_tier:
            self.next_tier.store([key], lambda _: [0])
        self.discard(key)
        self.counts.evicted_pages += 1

    def read(self, key: PageKey) -> StoredPage | None:
        """Return an empty page (`Tier.read`)."""
        if key not in self:
            return None
        self.touch(key)
        return StoredPage(_EMPTY, 0)

    def discard(self, key: PageKey) -> None:
        """Delete a page, if it is stored."""
        self._pop(key)


class _NoCopies(PageCopies):
    """Copies of pages without contents, which take no time."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    def save(self, pages: Sequence[int], buffers: Sequence[Tensor]) -> None: ...

    def load(self, pages: Sequence[int], buffers: Sequence[Tensor]) -> None: ...

    def checksums(self, pages: Sequence[int], groups: Sequence[int]) -> Sequence[int]:
        return [0] * len(pages)


class VirtualTiers(CacheTiers):
    """Tiers under a virtual clock, which takes the place of their thread.

    Loading and saving take the time of their pages at the rates of the tiers. The pages of a reload can be read from
    its end on.
    """

    def __init__(
        self,
        cache: PrefixCache,
        specs: Sequence[TierSpec],
        page_bytes: int,
        clock: VirtualClock,
        sync: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Create the tiers of a worker; `sync` is its context for changes outside of steps."""
        tiers = [VirtualTier(spec, page_bytes) for spec in specs]
        super().__init__(cache, _NoCopies(page_bytes), tiers, lambda: clock.now - self._behind_s)
        self._page_s = {tier.tier: tier.page_s for tier in tiers}
        self._virtual, self._sync = clock, sync
        self._behind_s = 0.0
        """The seconds by which the tiers' clock is behind: a reload is executed at its end, as if it had just begun."""
        self._busy = False

    def start(self, on_open: Callable[[], None] = lambda: None) -> None:
        """Open the tiers, and save pages from now on."""
        self._cache.save_to(self._saves, self._tier_of)
        self._open()
        on_open()

    def _wake(self) -> None:
        if not self._busy:
            self._busy = True
            self._virtual.after(0.0, self._begin_next)

    def _begin_next(self) -> None:
        """Schedule the end of the next reload or batch of saves."""
        if self._reloads:
            reload = self._reloads[0]
            seconds = sum(count * self._page_s[tier] for tier, count in reload.pages.items())
            seconds = max(0.0, min(seconds, reload.deadline - self._virtual.now))
        elif count := min(len(self._saves), BATCH):
            seconds = count * self._page_s[self.tiers[0].tier]
        else:
            self._busy = False
            return
        self._virtual.after(seconds, partial(self._end, seconds))

    def _end(self, seconds: float) -> None:
        with self._sync():
            self._behind_s = seconds
            self._step()
            self._behind_s = 0.0
        self._begin_next()

    def _load_from(self, tier: Tier[Any], pages: Sequence[int], keys: dict[int, PageKey]) -> list[int]:
        loaded = super()._load_from(tier, pages, keys)
        self._behind_s -= len(loaded) * self._page_s[tier.tier]
        return loaded
