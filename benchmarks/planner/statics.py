"""What each split of a real cluster keeps in each kind of hour, without a planner; and how fast its workers are."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.load.report import LoadReport
from benchmarks.load.run import LoadSettings
from benchmarks.load.slo import SloCell
from benchmarks.load.target import Target
from benchmarks.planner.live_hours import HOUR_BITS, LiveHour
from benchmarks.planner.live_load import ask
from benchmarks.planner.pace import serve_answers, serve_prompts
from benchmarks.planner.sizes import Pace
from benchmarks.strategies.rows import Strategy
from benchmarks.strategies.switch import Switch
from planner.decision import Split

KEPT = 0.97
"""Part of the requests that the right split should keep: an hour of which it keeps less asks for too much."""
LESS_MIN, LESS_MAX = 0.9, 0.95
"""What such an hour asks for instead, in parts: what was kept of it, within these bounds."""
RETRIES = 2
"""Hours that may be asked again in all: each takes its time from the day."""


@dataclass(slots=True)
class Statics:
    """Of one cluster, which is switched from split to split."""

    target: Target
    switch: Switch
    load: LoadSettings
    seed: int
    retries: int = RETRIES
    loads: list[LoadReport] = field(default_factory=list)
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    """Part of the requests that was kept, by split and kind."""

    def measure(self, workers: int, batch: int) -> tuple[Pace, float]:
        """The pace of so many workers, each of which decodes so many answers at most → it, and what a load takes beside
        its requests, in seconds.
        """
        most = workers - 1
        self._to(Split(most, 1))
        prompts, handover_s = serve_prompts(self.target, most, self.load)
        self._to(Split(1, most))
        answers, step_s, other_s, beside_s = serve_answers(self.target, most, batch, self.load)
        return Pace(workers, prompts, answers, step_s, max(handover_s, other_s)), beside_s

    def tuned(self, split: Split, kind: LiveHour, number: int, cell: SloCell, seconds: float) -> LiveHour:
        """An hour that `split`, the right one, can keep: as it is, or one that asks for less."""
        while (kept := self.keep(split, kind, number, cell, seconds)) < KEPT and self.retries:
            self.retries -= 1
            kind = replace(kind, rate=round(kind.rate * min(max(kept, LESS_MIN), LESS_MAX), 3))
        return kind

    def all(self, splits: Sequence[Split], kinds: Sequence[LiveHour], cell: SloCell, seconds: float) -> None:
        """Those that are not known yet."""
        for split in splits:
            for number, kind in enumerate(kinds):
                if kind.name not in self.shares.get(split.text, {}):
                    self.keep(split, kind, number, cell, seconds)

    def keep(self, split: Split, kind: LiveHour, number: int, cell: SloCell, seconds: float) -> float:
        """The part of the requests of such an hour, the day's hour of this number, that `split` keeps."""
        self._to(split)
        # Every load has tokens of its own: none finds another's prompts in a cache.
        fresh = self.seed + number + ((len(self.loads) + 1) << HOUR_BITS)
        workload = replace(kind.workload(seconds, self.seed + number), seed=fresh)
        report = ask(self.target, workload, cell, self.load, where=split.text)
        share = report.scores[0].share
        self.loads.append(report)
        self.shares.setdefault(split.text, {})[kind.name] = round(share, 4)
        return share

    def goodput(self, due_per_s: dict[str, float]) -> dict[str, dict[str, float]]:
        """Requests kept a second of each split and kind, where so many are due: the day's, by chance, are not as many
        as those that were asked.
        """
        return {
            split: {kind: round(share * due_per_s[kind], 4) for kind, share in shares.items()}
            for split, shares in self.shares.items()
        }

    def as_result(self) -> list[dict[str, Any]]:
        """Ready for JSON."""
        return [{"kind": load.workload.name, **load.as_result()} for load in self.loads]

    def _to(self, split: Split) -> None:
        settings = {"mode": "disaggregated", "prefill": split.prefill, "decode": split.decode}
        self.switch.to(Strategy(split.text, "disaggregated", settings))
