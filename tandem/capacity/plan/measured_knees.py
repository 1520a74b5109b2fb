"""Compares the knees of simulated clusters with measured ones in a strategy table, a result of `benchmarks.strategies`.

A knee is the highest request rate at which most requests meet their latency targets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.capacity.simulation.arrivals import Mix
from tandem.capacity.simulation.hardware import Hardware
from tandem.capacity.simulation.knee import KEPT, Trial, find_knee
from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.strategy import Strategy
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.mode import Mode
from tandem.protocol.policy_name import PolicyName
from tandem.settings.slo import DEFAULT_CLASSES, SloClass

NEAR = 0.15
"""Relative difference between a predicted and a measured knee up to which the prediction counts as correct."""
MIXES = {"balanced": Mix(1.0, 2000, 500), "decode-heavy": Mix(1.0, 1000, 3000)}
"""The synthetic workloads of `benchmarks.strategies`."""
STEPS = 2.0
ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class Compared:
    """A predicted and a measured knee, as rates in requests per second.

    The measured knee lies between `kept`, the highest rate that met the targets (0 = none), and `lost`, the lowest rate
    above it that did not (None = none).
    """

    workload: str
    row: str
    cell: str
    kept: float
    lost: float | None
    predicted: float

    @property
    def near(self) -> bool:
        """True if the predicted knee is near the measured one."""
        return is_near(self.predicted, self.kept, self.lost)


def is_near(predicted: float, least: float, most: float | None) -> bool:
    """Return True if `predicted` is in `least` … `most`, extended outwards by the fraction `NEAR`; None = no limit."""
    return least * (1 - NEAR) <= predicted <= (float("inf") if most is None else most * (1 + NEAR))


def check(file: Path, machine: Hardware) -> Iterator[Compared]:
    """Simulate the strategies of a strategy table, and yield each predicted knee with the measured one.

    There is one pair of knees for each workload, strategy and service class. Workloads and strategies with unknown
    names are left out. Raises InvalidArgument if `file` is not a strategy table.
    """
    table = _read(file)
    workers = len(table["workers"]) if isinstance(table["workers"], list) else int(table["workers"])
    for workload, rows in _loads(table).items():
        for row, loads in rows.items():
            strategy = _strategy(row, workers)
            for slo in _classes(table) if strategy and workload in MIXES else ():
                assert strategy is not None
                kept, lost = bracket(loads, slo.name)
                asks = table.get("ask") == "all" or (table.get("ask") == ADAPTIVE and row == ADAPTIVE)
                trial = Trial(machine, strategy, MIXES[workload], slo, Network(), asks=asks)
                knee = find_knee(trial.load, kept or (lost or 1.0) / 2)
                yield Compared(workload, row, slo.name, kept, lost, 0.0 if knee is None else knee.rate)


def bracket(loads: Sequence[Mapping[str, Any]], cell: str) -> tuple[float, float | None]:
    """Return the highest rate at which the cell met its targets, and the lowest rate above it at which it missed them.

    The first is 0 if the cell met its targets at no rate; the second is None if it missed them at no higher rate.
    """
    shares = {float(load["rate"]): load["goodput"][cell]["share"] for load in loads}
    kept = max((rate for rate, share in shares.items() if share >= KEPT), default=0.0)
    return kept, min((rate for rate, share in shares.items() if rate > kept and share < KEPT), default=None)


def _read(file: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument("--check", f"{file.name} cannot be read: {error}") from None
    if not {"loads", "tables", "workers", "model"} <= table.keys():
        raise InvalidArgument("--check", f"{file.name} is no result of benchmarks.strategies")
    return table


def _loads(table: Mapping[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """Return the loads by workload and by row of the table.

    In the table of a single workload, the rows may be at the top level.
    """
    names, loads = list(table["tables"]), table["loads"]
    return {names[0]: loads} if len(names) == 1 and names[0] not in loads else {name: loads[name] for name in names}


def _classes(table: Mapping[str, Any]) -> list[SloClass]:
    """Return the service classes to compare.

    If a class gives its ITL target in steps, the target becomes `STEPS` decode steps of the measured cluster.
    """
    step_s = table.get("unloaded_step_s") or table.get("unloaded_step_ms", 0.0) / 1e3
    if not step_s:
        raise InvalidArgument("--check", "the table does not say how long an unloaded step took; measure it again")
    return [
        SloClass(slo.name, slo.ttft_s, STEPS * step_s if slo.itl_steps < float("inf") else slo.itl_s)
        for slo in DEFAULT_CLASSES
        if slo.has_targets
    ]


def _strategy(row: str, workers: int) -> Strategy | None:
    """Return the strategy named by a row of the table, such as `disaggregated-2-6`; None for unknown names."""
    if row.startswith("disaggregated-"):
        prefill, decode = (int(part) for part in row.split("-")[1:])
        return Strategy(row, Mode.DISAGGREGATED, prefill, decode)
    name, _, budget = row.partition("-")
    policies = {
        "shared": (Mode.COLOCATED, PolicyName.UNCHUNKED),
        "chunked": (Mode.COLOCATED, PolicyName.CHUNKED),
        "priority": (Mode.COLOCATED, PolicyName.DECODE_PRIORITY),
        ADAPTIVE: (Mode.ADAPTIVE, PolicyName.DECODE_PRIORITY),
    }
    if name not in policies or (budget and not budget.isdecimal()):
        return None
    mode, policy = policies[name]
    return Strategy(row, mode, shared=workers, step_policy=policy, step_budget=int(budget) if budget else None)
