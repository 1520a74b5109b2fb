"""The transitions of a lease's pages."""

from dataclasses import dataclass
from enum import Enum

from tandem.protocol.messages import Lease, PeerRef


class PageAction(Enum):
    """The action of the caller on the pages of a lease that changed."""

    NONE = "none"
    """The lease is over and never held pages; its promise is returned."""
    QUARANTINE = "quarantine"
    """Advertised → quarantined: the request is over, the pages are not yet safe."""
    FREE = "free"
    """The writer is quiescent: advertised or quarantined → free."""
    ADMIT = "admit"
    """All bytes have arrived: advertised → owned by the request."""


@dataclass(frozen=True, slots=True)
class LeaseChange:
    """A lease that left its state.

    Every lease ends with exactly one of NONE, FREE or ADMIT, perhaps after QUARANTINE.
    """

    lease: Lease
    prefill: PeerRef
    action: PageAction
    page_ids: tuple[int, ...]
