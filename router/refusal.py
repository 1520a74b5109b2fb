"""Why requests are turned away before they are admitted: one word for metrics beside the sentence for clients."""

from enum import StrEnum

from wire.errors import InvalidArgument, NotFound, ResourceExhausted, TandemError


class Refusal(StrEnum):
    """Values of the label `reason`."""

    QUEUE_FULL = "queue_full"
    TENANT_QUEUE_FULL = "tenant_queue_full"
    SLO_TTFT = "slo_ttft"
    """Its first token would come later than its class promises."""
    SLO_ITL = "slo_itl"
    """Its tokens would come further apart than its class promises."""
    NO_WORKER = "no_worker"
    """Nobody serves, or nobody is ready."""
    INVALID = "invalid"
    """The request itself is wrong."""


class Refused(ResourceExhausted):
    """There is no room, or no hope; `reason` says which."""

    def __init__(self, reason: Refusal, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason


def reason_of(error: TandemError) -> Refusal:
    """Why a listener or the dispatcher refused a request."""
    if isinstance(error, Refused):
        return error.reason
    return Refusal.INVALID if isinstance(error, InvalidArgument | NotFound) else Refusal.NO_WORKER
