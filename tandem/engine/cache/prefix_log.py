"""Batches of changes of a prefix cache, for copies of its index elsewhere."""

from collections.abc import Iterable

from tandem.protocol.prefixes import PrefixChanges, PrefixRun


class PrefixLog:
    """The changes since the last batch: the final state of each page, not its history. Guarded by its cache's lock."""

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes | None] = {}
        """The parent of each digest that changed; None = it was evicted."""
        self.sequence = 0
        """The number of the last batch taken."""
        self.stored_pages = self.removed_pages = 0
        """The numbers of pages that were ever indexed and evicted."""

    def stored(self, digest: bytes, parent: bytes) -> None:
        """Records that a page was indexed."""
        self._parents.pop(digest, None)  # to the end: after its parent
        self._parents[digest] = parent
        self.stored_pages += 1

    def removed(self, digest: bytes) -> None:
        """Records that a page was evicted."""
        self._parents[digest] = None
        self.removed_pages += 1

    def take(self) -> PrefixChanges | None:
        """Returns all changes since the last call, None if there are none."""
        if not self._parents:
            return None
        changed, self._parents = self._parents, {}
        self.sequence += 1
        stored = runs_of((digest, parent) for digest, parent in changed.items() if parent is not None)
        return PrefixChanges(self.sequence, stored, tuple(d for d, parent in changed.items() if parent is None))


def runs_of(pages: Iterable[tuple[bytes, bytes]]) -> tuple[PrefixRun, ...]:
    """Groups the (digest, parent) of pages into runs in which each page follows its parent."""
    runs: list[tuple[bytes, list[bytes]]] = []
    last = b""
    for digest, parent in pages:
        if not runs or parent != last:
            runs.append((parent, []))
        runs[-1][1].append(digest)
        last = digest
    return tuple(PrefixRun(parent, tuple(digests)) for parent, digests in runs)
