"""The log of changes of a prefix cache, which are sent in batches to the router's copy of the index."""

from collections.abc import Iterable

from tandem.protocol.prefixes import KvTier, PrefixChanges, PrefixRun, TierPages


class PrefixLog:
    """The changes since the last batch: the latest state of each changed digest, not its history.

    Guarded by the prefix cache's lock.
    """

    def __init__(self) -> None:
        self._changed: dict[bytes, bytes | KvTier | None] = {}
        """The newest place of each digest that has changed since the last batch.

        For an indexed digest it is its parent, for one that only a tier has the tier, and None if it is nowhere.
        """
        self.sequence = 0
        """The sequence number of the last batch."""
        self.stored_pages = self.removed_pages = 0
        """The numbers of digests indexed and evicted since the start."""

    def stored(self, digest: bytes, parent: bytes) -> None:
        """Record that a digest was indexed."""
        # Removed and inserted again, the digest moves to the end of the dict, and so comes after its parent.
        self._changed.pop(digest, None)
        self._changed[digest] = parent
        self.stored_pages += 1

    def described(self, digest: bytes, parent: bytes) -> None:
        """Record that the tokens of an indexed digest have become known, so that it is reported again."""
        self._changed.setdefault(digest, parent)

    def removed(self, digest: bytes, tier: KvTier | None) -> None:
        """Record that a digest was evicted from the pool; `tier` is the fastest tier that has it, if any."""
        self._changed[digest] = tier
        self.removed_pages += 1

    def moved(self, digest: bytes, tier: KvTier | None) -> None:
        """Record the fastest tier that has a digest which is not indexed; None = no tier has it any longer."""
        self._changed[digest] = tier

    def take(self) -> PrefixChanges | None:
        """Return all changes since the last call as one batch; None if there are none."""
        if not self._changed:
            return None
        changed, self._changed = self._changed, {}
        self.sequence += 1
        stored = runs_of((digest, place) for digest, place in changed.items() if isinstance(place, bytes))
        removed = tuple(digest for digest, place in changed.items() if place is None)
        tiers = tier_pages((digest, place) for digest, place in changed.items() if isinstance(place, KvTier))
        return PrefixChanges(self.sequence, stored, removed, tiers)


def tier_pages(places: Iterable[tuple[bytes, KvTier]]) -> tuple[TierPages, ...]:
    """Group pages, given as (digest, tier), by their tiers."""
    digests: dict[KvTier, list[bytes]] = {}
    for digest, tier in places:
        digests.setdefault(tier, []).append(digest)
    return tuple(TierPages(tier, tuple(members)) for tier, members in sorted(digests.items()))


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
