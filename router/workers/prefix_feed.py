"""Keeps one worker's part of the prefix index in step with what the worker says."""

from router.placement.prefix_index import PrefixIndex
from wire.prefixes import PrefixChanges, PrefixList

_KEPT_MAX = 1024
"""Batches that wait for a list; when more come, the oldest go, and another list is needed."""


class PrefixFeed:
    """Batches in order go to the index; after a gap nothing does until the list of all pages is there.

    It begins out of step: a worker may hold pages from before this router saw it.
    """

    def __init__(self, index: PrefixIndex, slot: int) -> None:
        self._index = index
        self._slot = slot
        self._sequence: int | None = None
        self._kept: list[PrefixChanges] = []

    @property
    def in_step(self) -> bool:
        """Whether the index knows what the worker holds; if not, `load` a list."""
        return self._sequence is not None

    def take(self, changes: PrefixChanges) -> None:
        """The worker's next batch."""
        if self._sequence is not None:
            if changes.sequence <= self._sequence:
                return
            if changes.sequence == self._sequence + 1:
                self._apply(changes)
                return
            self._sequence = None
        self._kept.append(changes)
        del self._kept[:-_KEPT_MAX]

    def load(self, pages: PrefixList) -> None:
        """All pages, asked for because of a gap; batches that came meanwhile and are newer follow it."""
        self._index.clear(self._slot)
        for run in pages.stored:
            self._index.store(self._slot, run.digests)
        self._sequence = pages.sequence
        kept, self._kept = self._kept, []
        for changes in kept:
            self.take(changes)

    def lose(self) -> None:
        """The stream broke: what follows, if anything does, has a gap."""
        self._sequence = None
        self._kept.clear()
        self._index.clear(self._slot)

    def _apply(self, changes: PrefixChanges) -> None:
        self._index.remove(self._slot, changes.removed)
        for run in changes.stored:
            self._index.store(self._slot, run.digests)
        self._sequence = changes.sequence
