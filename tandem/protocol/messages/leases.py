"""The leases with which a decode worker reserves pages for one attempt of a request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    """A decode worker's reservation of KV pages for one attempt of a request.

    `epoch` increases with each lease, so that late messages about an earlier lease are recognized and ignored.
    """

    request_id: str
    attempt: int
    epoch: int


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """A lease that a decode worker has granted.

    It expires `duration_s` seconds after it was granted, or after the last heartbeat that renewed it. `held_tokens` is
    the number of leading prompt tokens whose KV the worker has cached.
    """

    lease: Lease
    duration_s: float
    held_tokens: int = 0
