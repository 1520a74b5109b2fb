"""The reasons for which requests are rejected, as metric labels and as errors for clients."""

from enum import StrEnum

from tandem.protocol.errors import InvalidArgument, NotFound, RateLimited, ResourceExhausted, TandemError


class Refusal(StrEnum):
    """The reason for which a request is rejected; its values are those of the metric label `reason`."""

    QUEUE_FULL = "queue_full"
    TENANT_QUEUE_FULL = "tenant_queue_full"
    SLO_TTFT = "slo_ttft"
    """The predicted TTFT exceeds the target of the request's SLO class."""
    SLO_ITL = "slo_itl"
    """The predicted ITL exceeds the target of the request's SLO class."""
    NO_WORKER = "no_worker"
    """No worker is available, or none is ready."""
    QUOTA = "quota"
    """The quota of the API key is used up."""
    INVALID = "invalid"
    """The request itself is invalid."""


class Refused(ResourceExhausted):
    """The error for a request that is rejected because capacity is lacking or its targets cannot be met (`reason`)."""

    def __init__(self, reason: Refusal, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason


def reason_of(error: TandemError) -> Refusal:
    """Return the reason for which a listener or the dispatcher rejected a request with `error`."""
    if isinstance(error, Refused):
        return error.reason
    if isinstance(error, RateLimited):
        return Refusal.QUOTA
    return Refusal.INVALID if isinstance(error, InvalidArgument | NotFound) else Refusal.NO_WORKER
