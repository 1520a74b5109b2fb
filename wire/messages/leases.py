"""What a decode worker promises to one attempt at a request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    """A decode worker's promise to one attempt; `epoch` grows with each lease it grants and fences what is late."""

    request_id: str
    attempt: int
    epoch: int


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """A lease, how many seconds it lives without a heartbeat, and how many of the prompt's first tokens need not be
    sent.
    """

    lease: Lease
    duration_s: float
    held_tokens: int = 0
