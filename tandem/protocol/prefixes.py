"""Messages in which a worker reports its cached pages to routers, by digest (`tandem/protocol/page_digests.py`).

If the model has state layers, only the pages at whose ends the worker has a state are reported.
"""

from dataclasses import dataclass


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
    """A batch of changes of the prefix cache: pages added and removed since the previous batch; no page is in both.

    `sequence` numbers a worker's batches from 1; a router that misses a batch loads the full list.
    """

    sequence: int
    stored: tuple[PrefixRun, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixList:
    """All cached pages of a worker; each page comes after its parent, if that is in the list.

    `sequence` is the number of the last batch that the list includes; later batches may repeat pages of the list.
    """

    sequence: int
    stored: tuple[PrefixRun, ...] = ()
