"""Measures each split of a real cluster in each kind of hour, without a planner, and the workers' speed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.planner.live_hours import HOUR_BITS, LiveHour
from benchmarks.planner.live_load import ask
from benchmarks.planner.pace import serve_answers, serve_prompts
from benchmarks.planner.sizes import Pace
from benchmarks.strategies.rows import Strategy
from benchmarks.strategies.switch import Switch
from tandem.capacity.planner.decision import Split
from tandem.cli.load.report import LoadReport
from tandem.cli.load.run import LoadSettings
from tandem.cli.load.slo import SloCell
from tandem.cli.load.target import Target

KEPT = 0.97
"""Share of the requests that the right split should serve within the class; with less the hour is too heavy."""
LESS_MIN, LESS_MAX = 0.9, 0.95
"""Bounds of the factor by which the rate of such an hour is reduced; the factor is the share met."""
RETRIES = 2
"""Maximum number of repeated hours in total, as each takes its time from the day."""


@dataclass(slots=True)
class Statics:
    """Measurements on one cluster, which is switched from split to split."""

    target: Target
    switch: Switch
    load: LoadSettings
    seed: int
    retries: int = RETRIES
    loads: list[LoadReport] = field(default_factory=list)
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    """Share of the requests that met the class, by split and kind."""

    def measure(self, workers: int, batch: int) -> tuple[Pace, float]:
        """Measures the pace of `workers` workers with decode batches of `batch`; also returns a load's overhead."""
        most = workers - 1
        self._to(Split(most, 1))
        prompts, handover_s = serve_prompts(self.target, most, self.load)
        self._to(Split(1, most))
        answers, step_s, other_s, overhead_s = serve_answers(self.target, most, batch, self.load)
        return Pace(workers, prompts, answers, step_s, max(handover_s, other_s)), overhead_s

    def tuned(self, split: Split, kind: LiveHour, number: int, cell: SloCell, seconds: float) -> LiveHour:
        """Returns an hour that `split`, the right one, can serve: the given one, or one with a lower rate."""
        while (kept := self.keep(split, kind, number, cell, seconds)) < KEPT and self.retries:
            self.retries -= 1
            kind = replace(kind, rate=round(kind.rate * min(max(kept, LESS_MIN), LESS_MAX), 3))
        return kind

    def all(self, splits: Sequence[Split], kinds: Sequence[LiveHour], cell: SloCell, seconds: float) -> None:
        """Measures the hours that are not measured yet."""
        for split in splits:
            for number, kind in enumerate(kinds):
                if kind.name not in self.shares.get(split.text, {}):
                    self.keep(split, kind, number, cell, seconds)

    def keep(self, split: Split, kind: LiveHour, number: int, cell: SloCell, seconds: float) -> float:
        """Runs the day's hour of this number in `split`; returns the share of requests that met the class."""
        self._to(split)
        # Each load has its own tokens, so that no prompt of another one is in a cache.
        fresh = self.seed + number + ((len(self.loads) + 1) << HOUR_BITS)
        workload = replace(kind.workload(seconds, self.seed + number), seed=fresh)
        report = ask(self.target, workload, cell, self.load, where=split.text)
        share = report.scores[0].share
        self.loads.append(report)
        self.shares.setdefault(split.text, {})[kind.name] = round(share, 4)
        return share

    def goodput(self, due_per_s: dict[str, float]) -> dict[str, dict[str, float]]:
        """Returns the goodput of each split and kind at the day's actual rates.

        The rates of random arrivals differ from those that were asked for.
        """
        return {
            split: {kind: round(share * due_per_s[kind], 4) for kind, share in shares.items()}
            for split, shares in self.shares.items()
        }

    def as_result(self) -> list[dict[str, Any]]:
        """Returns all loads for JSON."""
        return [{"kind": load.workload.name, **load.as_result()} for load in self.loads]

    def _to(self, split: Split) -> None:
        settings = {"mode": "disaggregated", "prefill": split.prefill, "decode": split.decode}
        self.switch.to(Strategy(split.text, "disaggregated", settings))
