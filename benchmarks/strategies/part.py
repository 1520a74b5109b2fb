"""The parts of a strategy run: one file for each row and workload, so that a run that was cut short goes on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load.sweep import GOODPUT_SHARE, GROWTH, STEPS_MAX

Load = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """The loads of one row under one workload, by rising rate, in a file of its own."""

    strategy: str
    workload: str
    file: Path

    def loads(self) -> list[Load]:
        """What was measured so far, as `LoadReport.as_result` gives it."""
        if not self.file.exists():
            return []
        loads: list[Load] = json.loads(self.file.read_text(encoding="utf-8"))["loads"]
        return loads

    def add(self, load: Load, facts: dict[str, object]) -> None:
        """Keep one more load. The file is whole at any moment."""
        loads = [*self.loads(), load]
        text = json.dumps({"strategy": self.strategy, "workload": self.workload, "loads": loads, **facts}, indent=1)
        fresh = self.file.with_suffix(".new")
        fresh.write_text(text + "\n", encoding="utf-8")
        fresh.replace(self.file)

    def next_rate(self, first: float) -> float | None:
        """The rate to measure next, None = the knees of all cells lie behind: `first`, then each one by `GROWTH` more.

        The same for every row, so that rates can be compared.
        """
        loads = self.loads()
        if len(loads) == STEPS_MAX or (loads and not any(cell["share"] >= GOODPUT_SHARE for cell in goodput(loads))):
            return None
        return first * GROWTH ** len(loads)


def goodput(loads: Sequence[Load]) -> list[dict[str, float]]:
    """Every cell of the last load."""
    return list(loads[-1]["goodput"].values())


def knees(loads: Sequence[Load]) -> dict[str, float]:
    """For each cell the highest goodput of a load that kept its share, in requests a second; 0 if none did."""
    found: dict[str, float] = {}
    for load in loads:
        for cell, score in load["goodput"].items():
            reached = float(score["per_s"]) if score["share"] >= GOODPUT_SHARE else 0.0
            found[cell] = max(found.get(cell, 0.0), reached)
    return found
