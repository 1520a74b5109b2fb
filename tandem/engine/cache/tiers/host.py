"""The host tier: KV pages in one allocation of host memory, pinned if the page pool is on a GPU."""

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from tandem.engine.cache.page_key import PageKey
from tandem.engine.cache.tiers.host_memory import HostMemory
from tandem.engine.cache.tiers.tier import Fill, StoredPage, Tier
from tandem.engine.memory import GIB, free_bytes
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.prefixes import KvTier


class HostTier(Tier[tuple[int, int]]):
    """Pages in host memory. Evicted pages move to the next tier, if there is one.

    The location of a page is its slot in the memory, and its checksum.
    """

    def __init__(self, capacity_bytes: int, page_bytes: int, device: torch.device) -> None:
        """Create the tier of a page pool on `device`; `open` allocates its memory.

        Raises InvalidArgument if it holds no page, or if the host has less free memory.
        """
        super().__init__(KvTier.HOST, capacity_bytes, page_bytes)
        if not self.capacity:
            raise InvalidArgument(
                "kv_host_bytes", f"{capacity_bytes} bytes hold no KV page, which takes {page_bytes} bytes; choose more"
            )
        if capacity_bytes > (free := free_bytes(torch.device("cpu"))):
            raise InvalidArgument(
                "kv_host_bytes",
                f"{capacity_bytes / GIB:.2f} GiB for KV pages do not fit into the {free / GIB:.2f} GiB of host memory"
                " that are free; choose less",
            )
        self._device = device
        self._allocation: HostMemory | None = None
        self._memory = torch.empty(0, page_bytes, dtype=torch.uint8)
        self._free: list[int] = []
        self._ahead: dict[PageKey, None] = {}
        """The pages that the next tier does not have yet, oldest first."""

    def open(self) -> None:
        """Allocate the memory."""
        self._allocation = HostMemory(self.capacity, self.page_bytes, self._device)
        self._memory = self._allocation.rows
        self._free = list(range(self.capacity - 1, -1, -1))

    def store(self, keys: Sequence[PageKey], fill: Fill) -> None:
        """Store pages (`Tier.store`); `fill` is called for as many pages at once as the memory holds."""
        for first in range(0, len(keys), self.capacity):
            part = keys[first : first + self.capacity]
            self._evict(len(part) - len(self._free))
            slots = [self._free.pop() for _ in part]
            try:
                sums = fill([self._memory[slot] for slot in slots])
            except BaseException:
                self._free += slots
                raise
            for key, slot, checksum in zip(part, slots, sums, strict=True):
                if checksum is None:
                    self._free.append(slot)
                else:
                    self._put(key, (slot, checksum))
                    self.counts.stored_pages += 1
                    if self.next_tier is not None and key not in self.next_tier:
                        self._ahead[key] = None

    def _evict(self, count: int) -> None:
        """Evict the `count` least recently used pages, and move those to the next tier that it does not have."""
        for key in list(islice(self._pages, max(0, count))):
            if self.next_tier is not None:
                if key in self.next_tier:
                    self.next_tier.touch(key)
                else:
                    self._pass_on(key, self.next_tier)
            self.discard(key)
            self.counts.evicted_pages += 1

    def write_ahead(self) -> bool:
        """Store the oldest page in the next tier that this does not have (`Tier.write_ahead`)."""
        if self.next_tier is None or not self._ahead:
            return False
        self._pass_on(next(iter(self._ahead)), self.next_tier)
        return True

    def _pass_on(self, key: PageKey, next_tier: Tier[Any]) -> None:
        self._ahead.pop(key, None)
        next_tier.save([key], partial(self._copy, *self._pages[key]))

    def _copy(self, slot: int, checksum: int, buffers: Sequence[Tensor]) -> list[int | None]:
        buffers[0].copy_(self._memory[slot])
        return [checksum]

    def read(self, key: PageKey) -> StoredPage | None:
        """Return a stored page (`Tier.read`)."""
        location = self._pages.get(key)
        if location is None:
            return None
        self.touch(key)
        slot, checksum = location
        return StoredPage(self._memory[slot], checksum)

    def discard(self, key: PageKey) -> None:
        """Delete a page, if it is stored."""
        self._ahead.pop(key, None)
        if (location := self._pop(key)) is not None:
            self._free.append(location[0])

    def close(self) -> None:
        """Free the memory."""
        self._pages.clear()
        self._memory = torch.empty(0, self.page_bytes, dtype=torch.uint8)
        if self._allocation is not None:
            self._allocation.close()
