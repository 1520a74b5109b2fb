"""The leases by which a decode worker reserves pages for one attempt of a request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    """A decode worker's reservation of pages for one attempt.

    `epoch` grows with each lease, so that late messages about an earlier lease are recognized and dropped.
    """

    request_id: str
    attempt: int
    epoch: int


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """A lease, its duration in seconds without a heartbeat, and the number of first prompt tokens already cached."""

    lease: Lease
    duration_s: float
    held_tokens: int = 0
