"""Applies one worker's prefix cache updates to the prefix index.

Updates are numbered batches of pages that were stored, moved to a tier or removed. If a number is missing, updates are
lost, and the worker's full list of pages is loaded.
"""

from collections.abc import Collection

from router.placement.prefix_index import PrefixIndex
from router.workers.kv_events import KvEventLog
from tandem.protocol.prefixes import PrefixChanges, PrefixList

_KEPT_MAX = 1024
"""Maximum number of batches kept while a full list is loaded.

If more arrive, the oldest are dropped, and another full list must be loaded.
"""


class PrefixFeed:
    """Applies one worker's batches in order; after a lost batch it keeps the next ones until the full list is loaded.

    The `WorkerLink` owns it; all calls are on the event loop. It starts out of sync, because a worker may have cached
    pages before this router connected.
    """

    def __init__(self, index: PrefixIndex, slot: int, events: KvEventLog | None = None) -> None:
        """`events` gets the changes of the index; None = no KV events are published."""
        self._index = index
        self._events = events
        self._slot = slot
        self._sequence: int | None = None
        self._kept: list[PrefixChanges] = []

    @property
    def in_step(self) -> bool:
        """True if the index is in sync with the worker; if False, a full list must be loaded."""
        return self._sequence is not None

    def take(self, changes: PrefixChanges) -> None:
        """Apply the worker's next batch; drop a repeated batch, and keep for `load` a batch that follows a lost one."""
        if self._sequence is not None:
            if changes.sequence <= self._sequence:
                return  # the full list already includes this batch
            if changes.sequence == self._sequence + 1:
                self._apply(changes)
                return
            self._sequence = None
        self._kept.append(changes)
        del self._kept[:-_KEPT_MAX]

    def load(self, pages: PrefixList) -> None:
        """Replace the worker's pages by a full list, then apply the batches that are newer than the list."""
        self._clear()
        self._store(pages)
        self._sequence = pages.sequence
        kept, self._kept = self._kept, []
        for changes in kept:
            self.take(changes)

    def lose(self) -> None:
        """Remove the worker's pages from the index after its event stream broke; a full list must be loaded again."""
        self._sequence = None
        self._kept.clear()
        self._clear()

    def _apply(self, changes: PrefixChanges) -> None:
        self._remove(changes.removed)
        self._store(changes)
        self._sequence = changes.sequence

    def _store(self, pages: PrefixChanges | PrefixList) -> None:
        for run in pages.stored:
            self._index.store(self._slot, run.digests)
        for members in pages.tiers:
            self._index.store(self._slot, members.digests, members.tier)
            if self._events is not None:
                self._events.removed(members.digests)
        if self._events is not None and pages.stored:
            self._events.stored(pages.stored)

    def _remove(self, digests: Collection[bytes]) -> None:
        self._index.remove(self._slot, digests)
        if self._events is not None and digests:
            self._events.removed(digests)

    def _clear(self) -> None:
        self._remove(self._index.pages(self._slot))
