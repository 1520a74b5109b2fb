"""The accuracy of placement's predictions: one record per request, and running means of the errors."""

from dataclasses import dataclass

from router.placement.policy import Placement
from tandem.protocol.lifecycle.placement import PlacementStats

_PART_MIN = 0.01
"""The minimum weight of the newest record in the running means."""


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """The predicted and the observed latencies of a placement, in seconds, for a request that got all its tokens."""

    request_id: str
    prefill_worker: str
    decode_worker: str
    slo_class: str
    prediction: Placement
    ttft_s: float
    """The time from placement until the first token reached the router, in seconds."""
    itl_s: float | None
    """The mean gap between tokens, in seconds; None for an answer of one token."""
    cached_tokens: int
    """Number of prompt tokens that were not computed."""
    reloaded_tokens: int = 0
    """The part of `cached_tokens` that was loaded from tiers of the prefix cache."""

    @property
    def prediction_error_s(self) -> float:
        """Observed minus predicted TTFT, in seconds; negative if the first token came sooner than predicted."""
        return self.ttft_s - self.prediction.ttft_s

    @property
    def regret_s(self) -> float:
        """The excess of the observed cost over the predicted cost of the second best placement, in seconds.

        It is `max(0, cost_s + prediction_error_s - runner_up_s)`.
        """
        return max(0.0, self.prediction.cost_s + self.prediction_error_s - self.prediction.runner_up_s)

    @property
    def stats(self) -> PlacementStats:
        """The placement as the trace and the reply show it."""
        cost = self.prediction.prompt
        prompt_tokens = cost.resident_tokens + cost.reloaded_tokens + cost.computed_tokens
        cached = min(self.cached_tokens, prompt_tokens)
        reloaded = min(self.reloaded_tokens, cached)
        return PlacementStats(
            cached - reloaded,
            reloaded,
            prompt_tokens - cached,
            cost,
            self.ttft_s,
            self.regret_s,
        )


class PredictionQuality:
    """Running means of prediction errors over about the last hundred records.

    `ttft_error` and `itl_error` are means of |predicted - actual| ÷ actual. The dispatcher owns it and writes on the
    event loop.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self.ttft_error = 0.0
        self.itl_error = 0.0
        self.prediction_error_s = 0.0
        """Running mean of `PlacementRecord.prediction_error_s` in seconds; positive if predictions are optimistic."""
        self.last: PlacementRecord | None = None

    def record(self, record: PlacementRecord) -> None:
        """Add the record of a request that received all its tokens."""
        self.recorded += 1
        self.last = record
        part = max(_PART_MIN, 1 / self.recorded)
        self.prediction_error_s += part * (record.prediction_error_s - self.prediction_error_s)
        if record.ttft_s > 0:
            self.ttft_error += part * (abs(record.prediction_error_s) / record.ttft_s - self.ttft_error)
        if record.itl_s:
            error = abs(record.prediction.itl_s - record.itl_s) / record.itl_s
            self.itl_error += part * (error - self.itl_error)
