"""The leases by which a decode worker promises pages to one attempt of a request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    """A decode worker's promise of pages to one attempt; `epoch` grows with each lease and fences late messages."""

    request_id: str
    attempt: int
    epoch: int


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """A lease, its duration without a heartbeat in seconds, and the number of first prompt tokens held already."""

    lease: Lease
    duration_s: float
    held_tokens: int = 0
