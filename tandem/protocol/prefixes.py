"""Messages in which a worker reports its cached pages to routers, by digest (`tandem/protocol/page_digests.py`).

If the model has state layers, only the pages at whose ends the worker has a state are reported. A page is reported
where a request would read it: on the device, or otherwise in the fastest tier that has it.
"""

from dataclasses import dataclass
from enum import IntEnum


class KvTier(IntEnum):
    """A tier of the prefix cache, which keeps pages that the page pool may evict; numbered as in `tandem.v1.KvTier`.

    A lower number is a faster tier. The page pool of another worker (PEER) is no tier of this worker's cache, but pages
    are loaded from it likewise.
    """

    HOST = 1
    DISK = 2
    PEER = 3


@dataclass(frozen=True, slots=True)
class TierPages:
    """Pages that are not on the device, by the fastest tier from which they can be loaded."""

    tier: KvTier
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """Consecutive pages of one prefix.

    `parent` is the digest of the page before them, or the root digest of the salt.
    """

    parent: bytes
    digests: tuple[bytes, ...]
    token_ids: tuple[int, ...] = ()
    """The tokens of these pages; empty unless the worker reports tokens (`WorkerConfig.reports_tokens`)."""
    salt: str = ""
    """The salt of the prefix; "" unless the worker reports tokens."""


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """A batch of changes of the prefix cache: pages added, removed, and left in tiers only, since the previous batch.

    A page is in one of the three. `sequence` numbers a worker's batches from 1; a router that misses a batch loads the
    full list.
    """

    sequence: int
    stored: tuple[PrefixRun, ...] = ()
    removed: tuple[bytes, ...] = ()
    tiers: tuple[TierPages, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixList:
    """All cached pages of a worker; each page comes after its parent, if that is in the list.

    `sequence` is the number of the last batch that the list includes; later batches may repeat pages of the list.
    """

    sequence: int
    stored: tuple[PrefixRun, ...] = ()
    tiers: tuple[TierPages, ...] = ()
