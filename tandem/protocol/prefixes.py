"""Updates of a worker's prefix cache for routers: the cached pages, by digest (`tandem/protocol/page_digests.py`)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """Consecutive pages of one prefix; `parent` is the digest of the page before them, or the salt's root digest."""

    parent: bytes
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """The pages that were added to and removed from the cache since the previous batch. No page is in both.

    `sequence` counts a worker's batches from 1; a router that misses a batch loads the full list.
    """

    sequence: int
    stored: tuple[PrefixRun, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixList:
    """All cached pages, each after its parent.

    `sequence` is the number of the last batch that the list includes; later batches may repeat pages of the list.
    """

    sequence: int
    stored: tuple[PrefixRun, ...] = ()
