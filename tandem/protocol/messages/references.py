"""References to an attempt of a request and to an incarnation of a worker."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestRef:
    """A reference to one attempt of a request; attempts are numbered from 1."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class PeerRef:
    """A reference to one incarnation of a worker: each start of its process is an incarnation with a higher number."""

    worker_id: str
    incarnation: int
