"""The highest rate at which a cluster keeps its promise to nearly all, by short loads under the virtual clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from router.observability.verdict import Outcome as Kind
from router.slo import BEST_EFFORT, SloClass
from simulation.arrivals import Mix
from simulation.hardware import Hardware
from simulation.network import Network
from simulation.request import Outcome
from simulation.search.judge import judge
from simulation.search.network_jitter import Way
from simulation.search.strategy import Strategy

KEPT = 0.9
"""Part of the requests that must meet their class at the knee."""
REQUESTS = 150
SECONDS_MIN = 15.0
LIVES = 3.0
"""A load has at least so many requests and seconds, and lasts for so many mean answers."""
DRAIN_S = 30.0
GROWTH = 1.6
NEAR = 1.12
"""From one rate to the next until the knee lies between two, and how near these are in the end."""
LOADS_MAX = 6


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One load: the part of its requests that met the class, seconds to the first token and between tokens, and why
    others missed, by how many.
    """

    rate: float
    share: float
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    missed: dict[str, int]


@dataclass(frozen=True, slots=True)
class Trial:
    """Loads of one mix on one cluster. `asks`: requests name the class that they are judged by."""

    machine: Hardware
    strategy: Strategy
    mix: Mix
    slo: SloClass
    network: Network
    asks: bool = True
    seed: int = 0

    def load(self, rate: float) -> LoadFigures:
        """At so many requests a second, on a fresh cluster."""
        idle_s = self.machine.idle_step_s
        seconds = max(SECONDS_MIN, REQUESTS / rate, LIVES * self.mix.answer_tokens * idle_s)
        slo = self.slo if self.asks else BEST_EFFORT
        mix = replace(self.mix, rate=rate)
        asked = list(mix.requests(seconds, slo, self.machine.model.max_context, seed=self.seed))
        cluster = self.strategy.cluster(self.machine, self.network, self.slo)
        outcomes = cluster.run(asked, seconds + DRAIN_S)
        return self._figures(rate, len(asked), outcomes, idle_s)

    def _figures(self, rate: float, asked: int, outcomes: Sequence[Outcome], idle_s: float) -> LoadFigures:
        missed: dict[str, int] = {}
        firsts, gaps = [], []
        way = Way(self.network)
        for outcome in outcomes:
            moments = way.moments(outcome)
            kind = judge(outcome, self.slo, idle_s, moments).outcome
            if kind is not Kind.MET:
                missed[kind.value] = missed.get(kind.value, 0) + 1
            if not outcome.error:
                firsts.append(moments[0] - outcome.asked.due_s)
                gaps.append(np.diff(moments))
        if asked > len(outcomes):
            missed[Kind.FAILED.value] = missed.get(Kind.FAILED.value, 0) + asked - len(outcomes)
        ttft, gap = _quantiles(np.asarray(firsts)), _quantiles(np.concatenate(gaps) if gaps else np.zeros(0))
        return LoadFigures(rate, 1 - sum(missed.values()) / max(asked, 1), *ttft, *gap, missed)


def find_knee(load: Callable[[float], LoadFigures], guess: float) -> LoadFigures | None:
    """The load with the highest rate found that keeps the share; None if even a hundredth of the guess does not."""
    kept: LoadFigures | None = None
    beyond: float | None = None
    rate = guess
    for _ in range(LOADS_MAX):
        figures = load(rate)
        if figures.share >= KEPT:
            kept = figures
        else:
            beyond = rate
        if kept is not None and beyond is not None and beyond <= NEAR * kept.rate:
            break
        if kept is None:
            rate /= GROWTH
        elif beyond is None:
            rate *= GROWTH
        else:
            rate = (kept.rate * beyond) ** 0.5
    return kept


def _quantiles(values: np.ndarray) -> tuple[float, float]:
    """Median and 99th percentile; 0 of nothing."""
    if not len(values):
        return 0.0, 0.0
    middle, most = np.quantile(values, (0.5, 0.99))
    return float(middle), float(most)
