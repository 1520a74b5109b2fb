"""Finds the knee by short simulated loads: the highest rate at which most requests meet their service class."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from router.observability.request_outcome import Outcome as Kind
from tandem.capacity.simulation.arrivals import Mix
from tandem.capacity.simulation.hardware import Hardware
from tandem.capacity.simulation.network import DeliveryDelay, Network
from tandem.capacity.simulation.request import Outcome
from tandem.capacity.simulation.strategy import Strategy
from tandem.settings.slo import BEST_EFFORT, SloClass

KEPT = 0.9
"""Minimum fraction of requests that meet their service class at rates up to the knee."""
REQUESTS = 150
SECONDS_MIN = 15.0
LIVES = 3.0
"""Minimum duration of a load, as a multiple of a mean answer's duration.

A load also lasts at least `SECONDS_MIN` seconds, and has about `REQUESTS` requests or more.
"""
DRAIN_S = 30.0
GROWTH = 1.6
NEAR = 1.12
"""The search ends when the two rates that enclose the knee differ by at most this factor."""
LOADS_MAX = 6


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Results of one load: the share of requests that met the class, TTFT and ITL in seconds, and misses by cause."""

    rate: float
    share: float
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    missed: dict[str, int]


@dataclass(frozen=True, slots=True)
class Trial:
    """Runs loads of one request mix, each on a new simulated cluster.

    With `asks`, requests name the service class by which they are judged; otherwise the router treats them as best
    effort.
    """

    machine: Hardware
    strategy: Strategy
    mix: Mix
    slo: SloClass
    network: Network
    asks: bool = True
    seed: int = 0
    prefill: Hardware | None = None
    """The hardware of prefill workers; None = `machine`."""

    def load(self, rate: float) -> LoadFigures:
        """Run a load of `rate` requests per second on a new cluster."""
        idle_s = self.machine.idle_step_s
        seconds = max(SECONDS_MIN, REQUESTS / rate, LIVES * self.mix.answer_tokens * idle_s)
        slo = self.slo if self.asks else BEST_EFFORT
        mix = replace(self.mix, rate=rate)
        asked = list(
            mix.requests(
                seconds,
                slo,
                self.machine.model.max_context,
                page_tokens=self.machine.page_tokens,
                seed=self.seed,
            )
        )
        cluster = self.strategy.cluster(self.machine, self.network, self.slo, self.prefill)
        outcomes = cluster.run(asked, seconds + DRAIN_S)
        return self._figures(rate, len(asked), outcomes, idle_s)

    def _figures(self, rate: float, asked: int, outcomes: Sequence[Outcome], idle_s: float) -> LoadFigures:
        missed: dict[str, int] = {}
        firsts, gaps = [], []
        delay = DeliveryDelay(self.network)
        for outcome in outcomes:
            moments = delay.moments(outcome)
            kind = outcome.judge(self.slo, idle_s, moments).outcome
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
    """Return the load with the highest tried rate at which at least the share `KEPT` of requests met their class.

    Returns None if there is none. The search starts at the rate `guess`.
    """
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
    """Return the median and the 99th percentile; 0 for no values."""
    if not len(values):
        return 0.0, 0.0
    middle, most = np.quantile(values, (0.5, 0.99))
    return float(middle), float(most)
