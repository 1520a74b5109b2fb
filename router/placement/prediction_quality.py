"""What placement expected, and what came: one record a request, and how good the expectations are of late."""

from dataclasses import dataclass

from router.placement.latency_model import Prediction

_PART_MIN = 0.01
"""Least weight of the newest record in the means."""


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """One placement that went well; seconds. `itl_s` is the mean time between tokens, None of a single token."""

    request_id: str
    prefill_worker: str
    decode_worker: str
    slo_class: str
    prediction: Prediction
    ttft_s: float
    """From the choice to the first token here."""
    itl_s: float | None
    cached_tokens: int

    @property
    def surprise_s(self) -> float:
        """How much later the first token came than expected; negative: sooner."""
        return self.ttft_s - self.prediction.ttft_s

    @property
    def regret_s(self) -> float:
        """By how much the choice, as it turned out, was worse than what the next best one would have cost by
        prediction; 0 if it was not. What that one would have cost in truth nobody can see.
        """
        return max(0.0, self.prediction.cost_s + self.surprise_s - self.prediction.runner_up_s)


class PredictionQuality:
    """Running means; the newest hundred records or so count. Errors are |predicted - actual| ÷ actual."""

    def __init__(self) -> None:
        self.recorded = 0
        self.ttft_error = 0.0
        self.itl_error = 0.0
        self.surprise_s = 0.0
        """Mean of `PlacementRecord.surprise_s`: above 0, predictions are too good."""
        self.regret_s = 0.0
        self.last: PlacementRecord | None = None

    def record(self, record: PlacementRecord) -> None:
        """A request got all its tokens."""
        self.recorded += 1
        self.last = record
        part = max(_PART_MIN, 1 / self.recorded)
        self.surprise_s += part * (record.surprise_s - self.surprise_s)
        self.regret_s += part * (record.regret_s - self.regret_s)
        if record.ttft_s > 0:
            self.ttft_error += part * (abs(record.surprise_s) / record.ttft_s - self.ttft_error)
        if record.itl_s:
            error = abs(record.prediction.itl_s - record.itl_s) / record.itl_s
            self.itl_error += part * (error - self.itl_error)
