"""The transitions of a lease's pages."""

from dataclasses import dataclass
from enum import Enum

from tandem.protocol.messages import Lease, PeerRef


class PageAction(Enum):
    """The action of the caller on the pages of a lease whose state changed."""

    NONE = "none"
    """The lease has ended and never held pages; its reserved pages are released."""
    QUARANTINE = "quarantine"
    """Advertised → quarantined: the request has ended, but a write may still land in the pages."""
    FREE = "free"
    """The writer is quiescent: advertised or quarantined → free."""
    ADMIT = "admit"
    """All bytes have arrived: advertised → owned by the request."""


@dataclass(frozen=True, slots=True)
class LeaseChange:
    """A lease whose state changed, and what the caller does with its pages.

    Every lease ends with exactly one of NONE, FREE or ADMIT, possibly after QUARANTINE.
    """

    lease: Lease
    prefill: PeerRef
    action: PageAction
    page_ids: tuple[int, ...]
