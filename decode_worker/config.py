"""Settings of the decode half."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How much the decode half takes on, and how long it waits for what it was promised."""

    max_batch_requests: int = 64
    """Most requests of one decode step."""
    max_pages: int | None = None
    """Most pages promised to or held by its requests, quarantined ones aside; None = the whole pool."""
    lease_s: float = 5.0
    """Life of a lease without a heartbeat, in seconds."""
    quarantine_s: float = 5.0
    """From the known death of a prefill worker until the pages it might have written are free, in seconds."""
    check_deadline_s: float = 30.0
    """From the arrival of a request's pages until their check counts as failed, in seconds."""
    quarantine_share_max: float = 0.5
    """Part of its pages above which quarantine counts as exhausted: nothing is promised until less of them wait for
    silent prefill workers, 0 to 1."""
    retry_after_s: float = 0.2
    """The hint that goes with a refused reservation, in seconds."""
