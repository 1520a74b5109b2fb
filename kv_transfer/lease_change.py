"""The decisions of the lease table about a lease's pages."""

from dataclasses import dataclass
from enum import Enum

from tandem.protocol.messages import Lease, PeerRef


class PageAction(Enum):
    """The action that the caller must take on the pages of a lease whose state has changed."""

    NONE = "none"
    """The lease has ended and never held pages; its reserved pages are released."""
    QUARANTINE = "quarantine"
    """Advertised → quarantined: the request has ended, but a write to the pages may still land."""
    FREE = "free"
    """Advertised or quarantined → free: the writer is quiescent."""
    ADMIT = "admit"
    """Advertised → owned by the request: all bytes have arrived."""


@dataclass(frozen=True, slots=True)
class LeaseChange:
    """A lease whose state has changed, and the action that the caller must take on its pages.

    Every lease ends with exactly one of NONE, FREE or ADMIT, possibly after QUARANTINE.
    """

    lease: Lease
    prefill: PeerRef
    action: PageAction
    page_ids: tuple[int, ...]
