"""How many workers a demand needs, and how they are best split between the roles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.decision import Limits, Range, Split
from planner.demand import Demand, Promise
from planner.strain import Strain, WorkerFacts, decode_strain, prefill_strain, shared_strain


@dataclass(frozen=True, slots=True)
class Sizing:
    """A demand on workers of which those that prefill are like `prompts` and those that decode like `answers`."""

    demand: Demand
    promise: Promise
    prompts: WorkerFacts
    answers: WorkerFacts
    backlog_s: float = 0.0
    """Device seconds of waiting prompts to be worked off in each second."""
    prefill_scale: float = 1.0
    decode_scale: float = 1.0
    """What the strains turned out to be, in parts of what costs say."""

    def strains(self, split: Split) -> tuple[Strain, Strain]:
        """Of both roles, if workers were split like that; of a cluster that shares, twice the same."""
        promise, demand = self.promise, self.demand
        if split.shared:
            shared = shared_strain(demand, promise, self.answers, split.shared, self.backlog_s)
            scaled = replace(shared, value=shared.value * max(self.prefill_scale, self.decode_scale))
            return scaled, scaled
        prefill = prefill_strain(demand, promise, self.prompts, split.prefill, self.backlog_s)
        decode = decode_strain(demand, promise, self.answers, split.decode)
        return (
            replace(prefill, value=prefill.value * self.prefill_scale),
            replace(decode, value=decode.value * self.decode_scale),
        )

    def worst(self, split: Split) -> Strain:
        """The larger strain."""
        return max(self.strains(split), key=lambda strain: strain.value)

    def best(self, workers: int, limits: Limits, *, shared: bool = False) -> Split | None:
        """The split of so many workers whose larger strain is the smallest; None if the limits allow none. The strain
        of the one role falls with its workers, that of the other rises: the best is where they meet.
        """
        if shared:
            return Split(shared=workers)
        low = max(limits.prefill.least, workers - limits.decode.most)
        high = min(limits.prefill.most, workers - limits.decode.least)
        if low > high:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            prefill, decode = self.strains(Split(middle, workers - middle))
            low, high = (middle, high) if prefill.value > decode.value else (low, middle)
        return min(
            (Split(each, workers - each) for each in range(low, high + 1)), key=lambda each: self.worst(each).value
        )

    def fewest(self, total: Range, limits: Limits, strain: float, *, shared: bool = False) -> Split | None:
        """The fewest workers within `total` at `strain` or less, or the most there may be."""
        low, high = total.least, total.most
        while low < high:
            middle = (low + high) // 2
            split = self.best(middle, limits, shared=shared)
            enough = split is not None and self.worst(split).value <= strain
            low, high = (low, middle) if enough else (middle + 1, high)
        return self.best(low, limits, shared=shared)
