"""Settings of the decode half."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The time limits of the decode half, and the quarantine at which it promises nothing."""

    lease_s: float = 5.0
    """Life of a lease without a heartbeat, in seconds."""
    quarantine_s: float = 5.0
    """Seconds from the death of a local prefill worker until the pages it might have written are free.

    They count from the end of its permission to write.
    """
    quarantine_far_s: float = 60.0
    """The same where it was on another host, or nobody knows: what it sent may be on the way for long."""
    write_window_s: float = 10.0
    """For how long a prefill worker may write to the pages it was given before it has to ask again, in seconds."""
    check_deadline_s: float = 30.0
    """Seconds from the arrival of a request's pages until their check counts as failed."""
    quarantine_share_max: float = 0.5
    """The share of its pages, 0 to 1, above which quarantine counts as exhausted and nothing is promised."""
    retry_after_s: float = 0.2
    """The hint that goes with a refused reservation, in seconds."""
