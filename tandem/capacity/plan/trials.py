"""Short simulated loads for `tandem plan`: the knee of each strategy, and its latencies at the planned load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tandem.capacity.plan.inputs import PlanInputs
from tandem.capacity.planner.decision import Split
from tandem.capacity.simulation.arrivals import SIGMA, Mix
from tandem.capacity.simulation.knee import LoadFigures, Trial, find_knee
from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.strategy import Strategy, strategies
from tandem.settings.slo import SloClass

SIMULATED_MAX = 8
"""Maximum number of simulated workers; larger clusters are scaled in proportion.

Each GPU of an expert-parallel worker is simulated as a worker, since it has its own requests. A worker with pipeline
stages is simulated as several workers of one stage that together have its throughput.
"""
GUESSED = 0.8
"""The search for the knee starts at this fraction of the maximum rate that the cost model predicts."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The simulated result of one strategy; `knee` is None if even a small load misses the targets."""

    strategy: Strategy
    times: float
    """Number of planned workers per simulated worker."""
    knee: LoadFigures | None
    asked: LoadFigures

    @property
    def knee_rate(self) -> float:
        """The knee of all planned workers, in requests per second; 0 = none."""
        return 0.0 if self.knee is None else self.knee.rate * self.times


def trials(inputs: PlanInputs, split: Split) -> Iterator[TrialResult]:
    """Simulate each strategy, and yield its knee and its result at the planned load."""
    demand, targets = inputs.demand, inputs.targets
    slo = SloClass("plan", ttft_s=targets.ttft_s, itl_s=targets.gap_s)
    workers, prefill, times = _simulated(inputs, split)
    rate = demand.per_s / times
    mix = Mix(rate, demand.prompt_tokens, demand.answer_tokens, SIGMA, demand.cached)
    guess = max(GUESSED * rate / max(inputs.sizing.worst(split).value, 1e-3), 1e-3)
    machine, prefill_machine = inputs.decode.hardware(demand), inputs.prefill.hardware(demand)
    for strategy in strategies(workers, prefill, one_kind=inputs.one_kind):
        trial = Trial(machine, strategy, mix, slo, Network(), prefill=prefill_machine)
        yield TrialResult(strategy, times, find_knee(trial.load, guess), trial.load(rate))


def _simulated(inputs: PlanInputs, split: Split) -> tuple[int, int, float]:
    """Return the number of simulated workers, how many of them prefill, and of how many workers each is one.

    It is the number of at most `SIMULATED_MAX` workers whose split is nearest to that of all workers.
    """
    prefill = split.prefill * inputs.prefill.replicas
    total = prefill + (split.decode + split.shared) * inputs.decode.replicas
    share = prefill / total

    def divided(workers: int) -> int:
        return min(max(1, round(workers * share)), max(workers - 1, 1))

    most = min(round(total), SIMULATED_MAX)
    workers = min(range(most, min(most, 2) - 1, -1), key=lambda workers: abs(divided(workers) / workers - share))
    return workers, divided(workers), total / workers
