"""The accuracy of placement's predictions: one record per request, and running means of the errors."""

from dataclasses import dataclass

from router.placement.policy import Placement

_PART_MIN = 0.01
"""The smallest weight of the newest record in the running means."""


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """The predicted and the observed latencies of a placement whose request received all its tokens, in seconds."""

    request_id: str
    prefill_worker: str
    decode_worker: str
    slo_class: str
    prediction: Placement
    ttft_s: float
    """The time from placement to the first token at the router."""
    itl_s: float | None
    """The mean gap between tokens; None for an answer of one token."""
    cached_tokens: int

    @property
    def surprise_s(self) -> float:
        """Observed minus predicted TTFT, in seconds; negative if the first token came sooner than predicted."""
        return self.ttft_s - self.prediction.ttft_s

    @property
    def regret_s(self) -> float:
        """The excess of the observed cost over the predicted cost of the second best placement, in seconds.

        It is `max(0, cost_s + surprise_s - runner_up_s)`.
        """
        return max(0.0, self.prediction.cost_s + self.surprise_s - self.prediction.runner_up_s)


class PredictionQuality:
    """Running means over about the newest hundred records. Errors are |predicted - actual| ÷ actual.

    The dispatcher owns it and writes on the event loop.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self.ttft_error = 0.0
        self.itl_error = 0.0
        self.surprise_s = 0.0
        """The mean of `PlacementRecord.surprise_s`; predictions are optimistic if it is above 0."""
        self.last: PlacementRecord | None = None

    def record(self, record: PlacementRecord) -> None:
        """Add the record of a request that received all its tokens."""
        self.recorded += 1
        self.last = record
        part = max(_PART_MIN, 1 / self.recorded)
        self.surprise_s += part * (record.surprise_s - self.surprise_s)
        if record.ttft_s > 0:
            self.ttft_error += part * (abs(record.surprise_s) / record.ttft_s - self.ttft_error)
        if record.itl_s:
            error = abs(record.prediction.itl_s - record.itl_s) / record.itl_s
            self.itl_error += part * (error - self.itl_error)
