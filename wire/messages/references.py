"""Who is meant: one try at a request, one run of a worker."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestRef:
    """One try at one request: attempts count from 1."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class PeerRef:
    """One run of one worker process."""

    worker_id: str
    incarnation: int
