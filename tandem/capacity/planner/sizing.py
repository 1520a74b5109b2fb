"""Sizing: the number of workers that a demand needs, and their best split between the roles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.capacity.planner.decision import Split
from tandem.capacity.planner.demand import Demand, LatencyTargets
from tandem.capacity.planner.load_ratio import (
    LoadRatio,
    WorkerFacts,
    decode_load_ratio,
    prefill_load_ratio,
    shared_load_ratio,
)
from tandem.settings.planner import Limits, Range


@dataclass(frozen=True, slots=True)
class Sizing:
    """A demand, and the kinds of workers that serve it: prefill workers like `prompts`, decode workers like `answers`.

    Finds the best split of these workers.
    """

    demand: Demand
    targets: LatencyTargets
    prompts: WorkerFacts
    answers: WorkerFacts
    backlog_s: float = 0.0
    """Work on queued prompts in addition to the new load, in device seconds per second."""
    prefill_scale: float = 1.0
    decode_scale: float = 1.0
    """Factors on the modelled load ratios of prefill and decode, learned from missed targets."""

    def load_ratios(self, split: Split) -> tuple[LoadRatio, LoadRatio]:
        """Return the load ratios of prefill and of decode under a split; for shared workers, the same ratio twice."""
        targets, demand = self.targets, self.demand
        if split.shared:
            shared = shared_load_ratio(demand, targets, self.answers, split.shared, self.backlog_s)
            scaled = replace(shared, value=shared.value * max(self.prefill_scale, self.decode_scale))
            return scaled, scaled
        prefill = prefill_load_ratio(demand, targets, self.prompts, split.prefill, self.backlog_s)
        decode = decode_load_ratio(demand, targets, self.answers, split.decode)
        return (
            replace(prefill, value=prefill.value * self.prefill_scale),
            replace(decode, value=decode.value * self.decode_scale),
        )

    def worst(self, split: Split) -> LoadRatio:
        """Return the larger of the two load ratios of a split."""
        return max(self.load_ratios(split), key=lambda load_ratio: load_ratio.value)

    def best(self, workers: int, limits: Limits, *, shared: bool = False) -> Split | None:
        """Return the split of `workers` workers whose larger load ratio is smallest; None if the limits allow no split.

        The load ratio of one role falls with its number of workers while the other's rises, so the best split is where
        the two are closest. With `shared`, all workers do both.
        """
        if shared:
            return Split(shared=workers)
        low = max(limits.prefill.least, workers - limits.decode.most)
        high = min(limits.prefill.most, workers - limits.decode.least)
        if low > high:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            prefill, decode = self.load_ratios(Split(middle, workers - middle))
            low, high = (middle, high) if prefill.value > decode.value else (low, middle)
        return min(
            (Split(count, workers - count) for count in range(low, high + 1)),
            key=lambda split: self.worst(split).value,
        )

    def fewest(self, total: Range, limits: Limits, load_ratio: float, *, shared: bool = False) -> Split | None:
        """Return the best split of the smallest number of workers with load ratios of at most `load_ratio`.

        The number is within `total`. If no number is sufficient, return the best split of the maximum number; None if
        the limits allow no split.
        """
        low, high = total.least, total.most
        while low < high:
            middle = (low + high) // 2
            split = self.best(middle, limits, shared=shared)
            enough = split is not None and self.worst(split).value <= load_ratio
            low, high = (low, middle) if enough else (middle + 1, high)
        return self.best(low, limits, shared=shared)
