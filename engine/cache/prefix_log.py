"""What becomes known to a prefix cache and what is forgotten, in batches for those who keep a list of it elsewhere."""

from collections.abc import Iterable

from wire.prefixes import PrefixChanges, PrefixRun


class PrefixLog:
    """What a batch says is where pages have ended up, not how they came there. Guarded by its cache's lock."""

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes | None] = {}
        """Of each digest that changed, its parent; None = it is forgotten."""
        self.sequence = 0
        """Of the last batch that was taken."""
        self.stored_pages = self.removed_pages = 0
        """How many ever were."""

    def stored(self, digest: bytes, parent: bytes) -> None:
        self._parents.pop(digest, None)  # to the end: behind its parent
        self._parents[digest] = parent
        self.stored_pages += 1

    def removed(self, digest: bytes) -> None:
        self._parents[digest] = None
        self.removed_pages += 1

    def take(self) -> PrefixChanges | None:
        """All since the last time, None if there is nothing."""
        if not self._parents:
            return None
        changed, self._parents = self._parents, {}
        self.sequence += 1
        stored = runs_of((digest, parent) for digest, parent in changed.items() if parent is not None)
        return PrefixChanges(self.sequence, stored, tuple(d for d, parent in changed.items() if parent is None))


def runs_of(pages: Iterable[tuple[bytes, bytes]]) -> tuple[PrefixRun, ...]:
    """(digest, parent) of pages, those directly behind each other put together."""
    runs: list[tuple[bytes, list[bytes]]] = []
    last = b""
    for digest, parent in pages:
        if not runs or parent != last:
            runs.append((parent, []))
        runs[-1][1].append(digest)
        last = digest
    return tuple(PrefixRun(parent, tuple(digests)) for parent, digests in runs)
