"""The log of changes of a prefix cache, which are sent in batches to the router's copy of the index."""

from collections.abc import Iterable

from tandem.protocol.prefixes import PrefixChanges, PrefixRun


class PrefixLog:
    """The changes since the last batch: the latest state of each changed digest, not its history.

    Guarded by the prefix cache's lock.
    """

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes | None] = {}
        """The parent of each digest indexed since the last batch; None for a digest evicted since then."""
        self.sequence = 0
        """The sequence number of the last batch."""
        self.stored_pages = self.removed_pages = 0
        """The numbers of digests indexed and evicted since the start."""

    def stored(self, digest: bytes, parent: bytes) -> None:
        """Record that a digest was indexed."""
        # Removed and inserted again, the digest moves to the end of the dict, and so comes after its parent.
        self._parents.pop(digest, None)
        self._parents[digest] = parent
        self.stored_pages += 1

    def removed(self, digest: bytes) -> None:
        """Record that a digest was evicted."""
        self._parents[digest] = None
        self.removed_pages += 1

    def take(self) -> PrefixChanges | None:
        """Return all changes since the last call as one batch; None if there are none."""
        if not self._parents:
            return None
        changed, self._parents = self._parents, {}
        self.sequence += 1
        stored = runs_of((digest, parent) for digest, parent in changed.items() if parent is not None)
        return PrefixChanges(self.sequence, stored, tuple(d for d, parent in changed.items() if parent is None))


def runs_of(pages: Iterable[tuple[bytes, bytes]]) -> tuple[PrefixRun, ...]:
    """Group pages, given as (digest, parent), into runs in which each page's parent is the page before it."""
    runs: list[tuple[bytes, list[bytes]]] = []
    last = b""
    for digest, parent in pages:
        if not runs or parent != last:
            runs.append((parent, []))
        runs[-1][1].append(digest)
        last = digest
    return tuple(PrefixRun(parent, tuple(digests)) for parent, digests in runs)
