"""Compares what placement predicted with what was observed: one record per request, and running means."""

from dataclasses import dataclass

from router.placement.policy import Placement

_PART_MIN = 0.01
"""The least weight of the newest record in the means."""


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """One placement whose request got all its tokens; seconds. `itl_s` is the mean gap, None of a single token."""

    request_id: str
    prefill_worker: str
    decode_worker: str
    slo_class: str
    prediction: Placement
    ttft_s: float
    """The time from placement to the first token at the router."""
    itl_s: float | None
    cached_tokens: int

    @property
    def surprise_s(self) -> float:
        """The time by which the first token came later than predicted; negative if it came sooner."""
        return self.ttft_s - self.prediction.ttft_s

    @property
    def regret_s(self) -> float:
        """The excess of the observed cost over the runner-up's predicted cost.

        It is `max(0, cost_s + surprise_s - runner_up_s)`.
        """
        return max(0.0, self.prediction.cost_s + self.surprise_s - self.prediction.runner_up_s)


class PredictionQuality:
    """Running means over about the newest hundred records. Errors are |predicted - actual| ÷ actual."""

    def __init__(self) -> None:
        self.recorded = 0
        self.ttft_error = 0.0
        self.itl_error = 0.0
        self.surprise_s = 0.0
        """The mean of `PlacementRecord.surprise_s`; above 0, predictions are optimistic."""
        self.last: PlacementRecord | None = None

    def record(self, record: PlacementRecord) -> None:
        """Add the record of a request that got all its tokens."""
        self.recorded += 1
        self.last = record
        part = max(_PART_MIN, 1 / self.recorded)
        self.surprise_s += part * (record.surprise_s - self.surprise_s)
        if record.ttft_s > 0:
            self.ttft_error += part * (abs(record.surprise_s) / record.ttft_s - self.ttft_error)
        if record.itl_s:
            error = abs(record.prediction.itl_s - record.itl_s) / record.itl_s
            self.itl_error += part * (error - self.itl_error)
