"""The parts of a strategy run: one file for each row and workload, so that a run that was cut short goes on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load import sweep
from benchmarks.strategies.folder import damaged, read_kept

Load = dict[str, Any]
_ASKED = ("ttft_ms", "gap_ms", "tokens_per_s", "errors", "served_by", "steps")
"""What is kept of the load of each class."""


@dataclass(frozen=True, slots=True)
class Part:
    """The loads of one row under one workload, by rising rate, in a file of its own."""

    strategy: str
    workload: str
    file: Path

    def loads(self) -> list[Load]:
        """What was measured so far, as `LoadReport.as_result` gives it. InvalidArgument if the file is damaged."""
        if not self.file.exists():
            return []
        loads: list[Load] = self._read()["loads"]
        return loads

    def add(self, load: Load, facts: dict[str, object]) -> None:
        """Keep one more load. The file is whole at any moment."""
        loads = [*self.loads(), load]
        text = json.dumps({"strategy": self.strategy, "workload": self.workload, "loads": loads, **facts}, indent=1)
        fresh = self.file.with_suffix(".new")
        fresh.write_text(text + "\n", encoding="utf-8")
        fresh.replace(self.file)

    def next_rate(self, first: float) -> float | None:
        """The rate to measure next, None = the knees of all cells lie behind: see `sweep.next_rate`.

        The same for every row, so that rates can be compared.
        """
        return sweep.next_rate(first, [goodput_of(load) for load in self.loads()])

    def fact(self, name: str) -> object:
        """What every load of the part has in common, e.g. its `dtype`; FileNotFoundError before the first."""
        return self._read()[name]

    def _read(self) -> Load:
        content = read_kept(self.file)
        loads = content.get("loads") if isinstance(content, dict) else None
        if not isinstance(loads, list) or not all(
            isinstance(load, dict) and {"rate", "goodput"} <= load.keys() for load in loads
        ):
            raise damaged(self.file)
        part: Load = content
        return part


def joined(loads: Mapping[str, Load]) -> Load:
    """One load of those with the same arrivals under each class: a cell's goodput is what the load that asked for it
    had, it is valid if all of them are, all else is the middle class's.
    """
    if len(loads) == 1:
        return next(iter(loads.values()))
    middle = list(loads)[len(loads) // 2]
    goodput = {cell: load["goodput"][cell] for cell, load in loads.items()}
    asked = {cell: {name: load[name] for name in _ASKED if name in load} for cell, load in loads.items()}
    valid = all(load.get("valid", True) for load in loads.values())
    return loads[middle] | {"goodput": goodput, "asked": asked, "valid": valid}


def knees(loads: Sequence[Load]) -> dict[str, float]:
    """For each cell the highest goodput of a load that kept its share, in requests a second; 0 if none did."""
    return sweep.knees_of([goodput_of(load) for load in loads])


def goodput_of(load: Load) -> sweep.Goodput:
    """Share of the requests that met it, and how many a second did, for each cell."""
    return {cell: (score["share"], score["per_s"]) for cell, score in load["goodput"].items()}
