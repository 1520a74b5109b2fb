"""Compares a simulated table with a measured one: each figure as a ratio, marked if it is far from 1."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.load.sweep import GOODPUT_SHARE
from benchmarks.strategies.part import knees
from tandem.protocol.errors import InvalidArgument

NEAR = 0.15
"""Largest relative difference that counts as near."""
_LATENCIES = (
    ("ttft", "ttft_ms", "p50"),
    ("ttft", "ttft_ms", "p99"),
    ("itl", "gap_ms", "p50"),
    ("itl", "gap_ms", "p99"),
)

Compared = Mapping[str, Mapping[str, Mapping[str, float | None]]]
"""Simulated / measured by workload, row and figure; None where nothing was measured."""
_Figure = tuple[str, float, float]
"""A figure's name, simulated and measured value."""


def compare(simulated: Any, measured: Any) -> Compared:
    """Compares all that both results have: loads with the same arrivals, and goodput at knees that both reached.

    Figures that are 0 in both are left out; InvalidArgument if no other is left.
    """
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for workload in simulated["loads"].keys() & measured["tables"].keys():
        ours, theirs = simulated["loads"][workload], _measured_loads(measured, workload)
        same = all(float(simulated[each]) == float(measured[each]) for each in ("seconds", "seed"))
        found[workload] = {
            row: _ratios((*(_same_loads(ours[row], theirs[row]) if same else ()), *_knees(ours[row], theirs[row])))
            for row in ours
            if row in theirs
        }
    if not any(figures for rows in found.values() for figures in rows.values()):
        raise InvalidArgument("--against", f"no figure to compare; ask for what that table has: {_what(measured)}")
    return found


def _ratios(figures: Iterable[_Figure]) -> dict[str, float | None]:
    return {name: _ratio(ours, theirs) for name, ours, theirs in figures if ours or theirs}


def _what(measured: Any) -> str:
    """Returns the options that a comparable run needs."""
    rows = [
        f"{workload} {row} at {', '.join(format(load['rate'], '.10g') for load in loads)}/s"
        for workload in measured["tables"]
        for row, loads in _measured_loads(measured, workload).items()
    ]
    return f"loads of {float(measured['seconds']):g} s with seed {measured['seed']}: {'; '.join(rows) or 'none'}"


def _measured_loads(measured: Any, workload: str) -> Mapping[str, Sequence[Any]]:
    """Returns the loads of a workload; results before 2026-11-22 08:00 have the columns of one rate only."""
    if "loads" in measured:
        loads: Mapping[str, Sequence[Any]] = measured["loads"][workload]
        return loads
    table = measured["tables"][workload]
    return {name: [_load_of(table["rate"], columns)] for name, columns in table["rows"].items()}


def _load_of(rate: float, columns: Mapping[str, Any]) -> Mapping[str, Any]:
    ttft, itl = ({"p50": columns[f"{each}_p50_ms"], "p99": columns[f"{each}_p99_ms"]} for each in ("ttft", "itl"))
    return {"rate": rate, "ttft_ms": ttft, "gap_ms": itl, "tokens_per_s": columns["tokens_per_s"], "goodput": {}}


def _same_loads(ours: Sequence[Any], theirs: Sequence[Any]) -> Iterator[_Figure]:
    by_rate = {load["rate"]: load for load in theirs}
    for load in ours:
        other = by_rate.get(load["rate"])
        if other is not None:
            at = f"at {load['rate']:g}/s"
            for name, key, level in _LATENCIES:
                yield f"{name} {level} {at}", load[key][level], other[key][level]
            yield f"tokens {at}", load["tokens_per_s"], other["tokens_per_s"]
            for cell in load["goodput"].keys() & other["goodput"].keys():
                yield f"share {cell} {at}", load["goodput"][cell]["share"], other["goodput"][cell]["share"]


def _knees(ours: Sequence[Any], theirs: Sequence[Any]) -> Iterator[_Figure]:
    found = knees(ours), knees(theirs)
    for cell in found[0].keys() & found[1].keys():
        if all(loads[-1]["goodput"][cell]["share"] < GOODPUT_SHARE for loads in (ours, theirs)):
            yield f"knee {cell}", found[0][cell], found[1][cell]


def _ratio(ours: float, theirs: float) -> float | None:
    return round(ours / theirs, 4) if theirs else None


def as_lines(compared: Compared) -> Iterator[str]:
    """Yields a line for each figure, with a mark on those too far off."""
    near = total = 0
    for workload, rows in compared.items():
        for row, figures in rows.items():
            for name, ratio in figures.items():
                good = ratio is not None and abs(ratio - 1) <= NEAR
                near, total = near + good, total + 1
                yield f"{workload:>16} {row:>20} {name:>24} {_text(ratio)}{'' if good else '  <-- beyond 15 %'}"
    yield f"{near} of {total} figures within {NEAR:.0%} of the measured ones"


def _text(ratio: float | None) -> str:
    return "none measured" if ratio is None else f"{ratio:.3f}"
