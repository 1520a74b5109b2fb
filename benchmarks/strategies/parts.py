"""The folder of a measured strategy table: one file per row and workload, so that an interrupted run can continue.

A folder holds loads of only one cluster and one kind of load.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import sweep
from tandem.protocol.errors import InvalidArgument

_RUN = "run.json"
Load = dict[str, Any]
_ASKED = ("ttft_ms", "gap_ms", "tokens_per_s", "errors", "served_by", "steps")
"""The figures that are kept for the load of each class."""


def claim(folder: Path, run: Mapping[str, object]) -> None:
    """Claim the folder for this run. Raises InvalidArgument if it has loads of a different run."""
    ours = {name: str(value) for name, value in run.items()}
    file = folder / _RUN
    folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        file.write_text(json.dumps(ours, indent=1) + "\n", encoding="utf-8")
        return
    kept = read_kept(file)
    if not isinstance(kept, dict):
        raise damaged(file)
    differences = [f"{name} {kept.get(name)}, not {value}" for name, value in ours.items() if kept.get(name) != value]
    if differences:
        raise InvalidArgument(
            "--parts", f"{folder} has loads of another run ({'; '.join(differences)}); name another folder"
        )


def read_kept(file: Path) -> Any:
    """Read a JSON file of the folder. Raises InvalidArgument if it is damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise damaged(file) from None


def damaged(file: Path) -> InvalidArgument:
    """Return the error for a damaged file, which says what to do about it."""
    if file.name == _RUN:
        return InvalidArgument(
            "--parts", f"{file} is damaged, so the run that these loads belong to is unknown; name another folder"
        )
    return InvalidArgument("--parts", f"{file} is damaged; delete it, and what it had is measured again")


@dataclass(frozen=True, slots=True)
class Part:
    """The loads of one row under one workload by ascending rate, stored in one file."""

    strategy: str
    workload: str
    file: Path

    def loads(self) -> list[Load]:
        """Return the loads measured so far, in the form of `LoadReport.as_result`.

        Raises InvalidArgument if the file is damaged.
        """
        if not self.file.exists():
            return []
        loads: list[Load] = self._read()["loads"]
        return loads

    def add(self, load: Load, facts: dict[str, object]) -> None:
        """Append one load and save the file atomically."""
        loads = [*self.loads(), load]
        text = json.dumps({"strategy": self.strategy, "workload": self.workload, "loads": loads, **facts}, indent=1)
        fresh = self.file.with_suffix(".new")
        fresh.write_text(text + "\n", encoding="utf-8")
        fresh.replace(self.file)

    def next_rate(self, first: float) -> float | None:
        """Return the rate to measure next, as `sweep.next_rate` does; None = the knees of all cells are passed.

        The rates are the same for every row, so that rows can be compared.
        """
        return sweep.next_rate(first, [goodput_of(load) for load in self.loads()])

    def fact(self, name: str) -> object:
        """Return a fact that all loads of the part share, such as its `dtype`.

        Raises FileNotFoundError before the first load.
        """
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
    """Join the loads of the different classes, all with the same arrivals, into one.

    The goodput of a cell is that of the load with its class. The result is valid if all loads are. All other figures
    are those of the middle class.
    """
    if len(loads) == 1:
        return next(iter(loads.values()))
    middle = list(loads)[len(loads) // 2]
    goodput = {cell: load["goodput"][cell] for cell, load in loads.items()}
    asked = {cell: {name: load[name] for name in _ASKED if name in load} for cell, load in loads.items()}
    valid = all(load.get("valid", True) for load in loads.values())
    return loads[middle] | {"goodput": goodput, "asked": asked, "valid": valid}


def knees(loads: Sequence[Load]) -> dict[str, float]:
    """Return, for each cell, the highest goodput with the required share in requests per second; 0 = no load has it."""
    return sweep.knees_of([goodput_of(load) for load in loads])


def goodput_of(load: Load) -> sweep.Goodput:
    """Return, for each cell, the share of requests that met it, and their number per second."""
    return {cell: (score["share"], score["per_s"]) for cell, score in load["goodput"].items()}
