"""What becomes of the pages of a lease."""

from dataclasses import dataclass
from enum import Enum

from wire.messages import Lease, PeerRef


class PageAction(Enum):
    """What the caller does with the pages of a lease that changed."""

    NONE = "none"
    """The lease is over and never held pages; its promise is given back."""
    QUARANTINE = "quarantine"
    """Advertised → quarantined: the request is over, the pages are not yet safe."""
    FREE = "free"
    """The writer is quiet: advertised or quarantined → free."""
    ADMIT = "admit"
    """All bytes have arrived: advertised → owned by the request."""


@dataclass(frozen=True, slots=True)
class LeaseChange:
    """A lease left its state. Every lease ends with exactly one of NONE, FREE or ADMIT, perhaps after QUARANTINE."""

    lease: Lease
    prefill: PeerRef
    action: PageAction
    page_ids: tuple[int, ...]
