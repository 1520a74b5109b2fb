"""The answers of one class at one worker: how many, and what they were promised between tokens there."""

from __future__ import annotations

from router.long_gaps import LongGaps
from router.slo import SloClass


class SloLoad:
    """`gaps` are those of the class at that worker."""

    __slots__ = ("count", "gap_s", "gaps", "target_s", "worst_s")

    def __init__(self, slo: SloClass, gaps: LongGaps, idle_step_s: float) -> None:
        self.count = 0
        self.gaps = gaps
        self.retarget(slo, idle_step_s)

    def retarget(self, slo: SloClass, idle_step_s: float) -> None:
        """Where a decode step of one request takes so long."""
        self.gap_s = slo.gap_target(idle_step_s)
        """At the class's percentile: some gaps may be longer."""
        self.worst_s = slo.worst_gap_s
        self.target_s = min(self.gap_s, self.worst_s)
