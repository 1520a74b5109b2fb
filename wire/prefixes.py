"""What a worker's prefix cache tells routers: which pages can be used again, by name (`wire/page_digests.py`)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """Pages of one prefix, each directly behind the one before; `parent` names the page before them, or the salt."""

    parent: bytes
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """Since the batch before: pages that can be used now, and pages that can be no longer. No page is in both.

    `sequence` counts a worker's batches, from 1: who misses one asks for the list.
    """

    sequence: int
    stored: tuple[PrefixRun, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixList:
    """All pages that can be used, each behind its parent, and the last batch that is contained; those that follow may
    name pages once more.
    """

    sequence: int
    stored: tuple[PrefixRun, ...] = ()
