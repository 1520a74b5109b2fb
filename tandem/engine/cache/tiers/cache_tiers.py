"""The tiers of a prefix cache, and the thread that copies pages between them and the page pool.

  save    a page that its last reader has released is copied into the first tier, unless that tier has it, while it is
          still in the pool (`tandem/engine/cache/pending_saves.py`). So an eviction costs nothing, and no allocation
          waits for a copy. The first tier passes pages on to the next one when there is nothing else to do, and
          at the latest when it evicts them. So a worker that restarts finds most pages on its disk
  reload  the pages of a prompt that the pool lacks and a tier has are copied into pages of the pool, which are owned by
          the reload until they are indexed. Each page's checksum is verified in the pool, so that an error in a tier or
          on the way is found. A page that is missing or wrong ends the reload: the tokens from there on are computed

Reloads come before saves. A reload that lasts longer than its deadline ends with the pages that it has loaded by then.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from tandem.engine.cache.page_key import PageKey
from tandem.engine.cache.pending_saves import PendingSave, PendingSaves
from tandem.engine.cache.prefix_cache import Prefix, PrefixCache
from tandem.engine.cache.tiers.page_copies import PageCopies
from tandem.engine.cache.tiers.tier import MeasuredRate, StoredPage, Tier
from tandem.engine.memory import GIB
from tandem.protocol.errors import FailedPrecondition, ResourceExhausted
from tandem.protocol.kv_pages import FREED
from tandem.protocol.messages import RequestRef, TierLoad
from tandem.protocol.prefixes import KvTier

log = logging.getLogger(__name__)

BATCH = 64
"""The maximum number of pages copied together: those whose checksums a GPU computes in one launch.

A reload waits at most for one batch of saves.
"""
_JOIN_S = 5.0
"""Seconds for which `close` waits for the copy in progress, which may hang with its disk."""


@dataclass(slots=True, eq=False)
class Reload:
    """The reload of the first `end` digests of a prompt. Created by `CacheTiers.plan`."""

    prefix: Prefix
    end: int
    pages: dict[KvTier, int]
    """The number of pages to be loaded from each tier, without those that an earlier reload loads."""
    keys: frozenset[PageKey] = frozenset()
    """The pages that this reload loads, or an earlier one for it."""
    deadline: float = 0.0
    """The time by the clock of the tiers at which the reload ends in any case."""
    done: "Future[None]" = field(default_factory=Future)
    """Completes when the reload has ended, whatever it has loaded."""


class CacheTiers:
    """The tiers of one worker's prefix cache, the fastest first. Owned by the worker, which calls `start` and `close`.

    `plan`, `begin` and the facts may be called from any thread.
    """

    def __init__(
        self,
        cache: PrefixCache,
        copies: PageCopies,
        tiers: Sequence[Tier[Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the tiers of `cache`. The first tier gets the pages of the pool, and each passes pages to the next."""
        self.tiers = tiers
        self.clock = clock
        self._cache = cache
        self._copies = copies
        self._rates = {tier.tier: MeasuredRate() for tier in tiers}
        self._reloads: deque[Reload] = deque()
        self._current: Reload | None = None
        self._numbers = itertools.count(1)
        self._work = threading.Event()
        self._saves = PendingSaves(self._wake)
        self._stopping = False
        self._on_open: Callable[[], None] = lambda: None
        self.opened = threading.Event()
        """Set once the tiers are open: the memory is allocated, and files of an earlier process are known."""
        self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)

    def start(self, on_open: Callable[[], None] = lambda: None) -> None:
        """Save pages from now on, and start the thread, which first opens the tiers and calls `on_open`. Idempotent."""
        if self._thread.ident is None:
            self._on_open = on_open
            self._cache.save_to(self._saves, self._tier_of)
            self._thread.start()

    # ---- any thread ----

    def plan(self, prefix: Prefix, tiers: int) -> Reload | None:
        """Return the reload of all that the first `tiers` tiers have of a prompt; None if they have nothing new."""
        usable = self.tiers[:tiers]
        end, missing = self._cache.reusable(prefix, lambda key: any(key in tier for tier in usable))
        if not missing:
            return None
        pages = dict.fromkeys((tier.tier for tier in usable), 0)
        # Concurrent requests with one prefix load it once: the later ones find the pages in the pool.
        keys = frozenset(missing)
        for key in keys.difference(*(earlier.keys for earlier in self._begun())):
            tier = next((tier for tier in usable if key in tier), None)
            if tier is not None:
                pages[tier.tier] += 1
        return Reload(prefix.part(end), end, pages, keys)

    @property
    def loads(self) -> tuple[TierLoad, ...]:
        """The measured speed of each tier and the depth of its queue."""
        now, begun = self.clock(), self._begun()
        return tuple(
            TierLoad(
                tier.tier,
                self._rates[tier.tier].seconds(tier.page_bytes, now),
                sum(reload.pages.get(tier.tier, 0) for reload in begun),
            )
            for tier in self.tiers
        )

    @property
    def summary(self) -> tuple[str, ...]:
        """The tiers with their sizes, as text."""
        return tuple(f"{tier.name} {tier.capacity * tier.page_bytes / GIB:.4g} GiB" for tier in self.tiers)

    @property
    def capacity(self) -> int:
        """Number of pages for which the tiers have room."""
        return sum(tier.capacity for tier in self.tiers)

    @property
    def stalled(self) -> bool:
        """True if a reload has not ended by its deadline, because a tier does not respond."""
        now = self.clock()
        return any(now > reload.deadline for reload in self._begun())

    def _tier_of(self, key: PageKey) -> KvTier | None:
        return next((tier.tier for tier in self.tiers if key in tier), None)

    def _report(self, key: PageKey) -> None:
        self._cache.tier_changed(key.digest)

    def _begun(self) -> list[Reload]:
        """Return the reload in progress and those that wait for it."""
        current = self._current
        return [*(() if current is None else (current,)), *tuple(self._reloads)]

    def begin(self, reload: Reload, within_s: float) -> None:
        """Start a reload, which ends within `within_s` seconds unless a tier hangs; `reload.done` then completes."""
        reload.deadline = self.clock() + within_s
        self._reloads.append(reload)
        self._wake()

    def close(self) -> None:
        """End the thread and free the memory of the tiers. Idempotent. Reloads that have not begun end at once."""
        self._stopping = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _wake(self) -> None:
        self._work.set()

    # ---- the thread ----

    def _run(self) -> None:
        self._open()
        while not self._stopping:
            self._work.clear()
            if not self._step():
                self._work.wait()
        while self._reloads:
            self._reloads.popleft().done.set_result(None)
        for tier in self.tiers:
            tier.close()

    def _open(self) -> None:
        """Open the tiers, and leave out those that cannot be opened."""
        opened = []
        for tier in self.tiers:
            try:
                tier.open()
                opened.append(tier)
            except FailedPrecondition as error:
                log.error("the %s tier of the prefix cache is not used: %s", tier.name, error.message)
            except Exception:
                log.exception("the %s tier of the prefix cache is not used", tier.name)
        for tier, next_tier in itertools.pairwise(opened):
            tier.next_tier = next_tier
        self.tiers = opened
        for tier in opened:
            tier.on_change = self._report
            for key in tier.stored_keys():
                self._report(key)
        self.opened.set()
        self._on_open()

    def _step(self) -> bool:
        """Do the next reload, a batch of saves or a write to a lower tier; return False if there was none of them."""
        try:
            if self._reloads:
                self._current = self._reloads.popleft()
                self._reload(self._current)
                return True
            return self._save() or any(tier.write_ahead() for tier in self.tiers)
        except Exception:
            log.exception("the tiers of the prefix cache continue after an error")
            return True
        finally:
            if (ended := self._current) is not None:
                self._current = None
                ended.done.set_result(None)

    def _save(self) -> bool:
        """Save a batch of pages; return False if there are none."""
        with self._cache.pool.lock:
            saves = self._saves.take(BATCH)
        try:
            if self.tiers:
                self._store([save for save in saves if not self._touch(save)])
        finally:
            for save in saves:
                self._finish(save)
        return bool(saves)

    def _touch(self, save: PendingSave) -> bool:
        """Make a page the most recently used one of the first tier; return False if that does not have it."""
        self.tiers[0].touch(save.key)
        return save.key in self.tiers[0]

    def _store(self, saves: Sequence[PendingSave]) -> None:
        if saves:
            self.tiers[0].save([save.key for save in saves], partial(self._fill, iter(saves)))

    def _fill(self, saves: Iterator[PendingSave], buffers: Sequence[Tensor]) -> list[int | None]:
        """Copy the pages of the next saves into `buffers`; return their checksums, None for evicted pages."""
        batch = list(itertools.islice(saves, len(buffers)))
        pages = [save.page for save in batch]
        self._copies.save(pages, buffers)
        sums = self._copies.checksums(pages, [save.key.group for save in batch])
        return [checksum if self._finish(save) else None for save, checksum in zip(batch, sums, strict=True)]

    def _finish(self, save: PendingSave) -> bool:
        """End a copy; return True if its page was not evicted meanwhile."""
        with self._cache.pool.lock:
            return self._saves.finish(save)

    def _reload(self, reload: Reload) -> None:
        if self.clock() > reload.deadline or self._stopping:
            return
        owner = RequestRef(f"kv-reload-{next(self._numbers)}", 1)
        try:
            pages = self._cache.begin_reload(owner, reload.prefix, reload.end)
        except ResourceExhausted:
            return
        entries = [entry for entry, page in enumerate(pages) if page != FREED]
        failed = set(entries)
        try:
            for first in range(0, len(entries), BATCH):
                if self.clock() > reload.deadline or self._stopping:
                    break
                batch = entries[first : first + BATCH]
                loaded = self._load_batch(reload, pages, batch)
                failed.difference_update(loaded)
                if len(loaded) < len(batch):
                    break
        finally:
            self._cache.complete_reload(owner, reload.prefix, pages, failed)

    def _load_batch(self, reload: Reload, pages: Sequence[int], batch: Sequence[int]) -> list[int]:
        """Load the pages with these indices in `pages`, each tier's separately; return those that are right."""
        groups = self._cache.kv.groups
        keys = {entry: PageKey(reload.prefix.digests[entry // groups], entry % groups) for entry in batch}
        loaded: list[int] = []
        for tier in self.tiers:
            here = [entry for entry, key in keys.items() if key in tier and entry not in loaded]
            if here:
                began = self.clock()
                right = self._load_from(tier, pages, {entry: keys[entry] for entry in here})
                seconds = self.clock() - began
                self._rates[tier.tier].add(self.clock(), len(right) * tier.page_bytes, seconds)
                tier.counts.loaded_s += seconds
                tier.counts.loaded_pages += len(right)
                loaded += right
        return loaded

    def _load_from(self, tier: Tier[Any], pages: Sequence[int], keys: dict[int, PageKey]) -> list[int]:
        """Load pages from a tier, and delete those from it whose checksums are wrong; return the entries of others."""
        read: dict[int, StoredPage] = {}
        for entry, key in keys.items():
            if (stored := tier.read(key)) is not None:
                read[entry] = stored
        targets = [pages[entry] for entry in read]
        self._copies.load(targets, [stored.data for stored in read.values()])
        sums = self._copies.checksums(targets, [keys[entry].group for entry in read])
        wrong = {entry for (entry, stored), total in zip(read.items(), sums, strict=True) if total != stored.checksum}
        for entry in wrong:
            tier.discard(keys[entry])
            tier.counts.corrupt_pages += 1
            log.warning("a KV page in the %s tier has another checksum than when it was stored", tier.name)
        return [entry for entry in read if entry not in wrong]
