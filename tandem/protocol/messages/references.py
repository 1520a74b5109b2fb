"""References to one attempt of a request and to one incarnation of a worker."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestRef:
    """One attempt of one request; attempts count from 1."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class PeerRef:
    """One incarnation of a worker process; a restart is a new incarnation with a higher number."""

    worker_id: str
    incarnation: int
