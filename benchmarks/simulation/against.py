"""A simulated table beside a measured one: each figure as a ratio, and whether it is near enough."""

from collections.abc import Iterator, Mapping
from typing import Any

NEAR = 0.15
"""How far a simulated figure may be from the measured one, as a part of it."""


def compare(simulated: Any, measured: Any) -> dict[str, dict[str, dict[str, float | None]]]:
    """Simulated ÷ measured, by workload, row and figure, of all that both have; None where nothing was measured."""
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for workload in simulated.keys() & measured.keys():
        ours, theirs = simulated[workload]["rows"], measured[workload]["rows"]
        same_load = simulated[workload]["rate"] == measured[workload]["rate"]
        found[workload] = {row: dict(_ratios(ours[row], theirs[row], same_load)) for row in ours if row in theirs}
    return found


def _ratios(ours: Mapping[str, Any], theirs: Mapping[str, Any], same_load: bool) -> Iterator[tuple[str, float | None]]:
    """Latencies only where both are of one rate: goodput is at the knee anyway."""
    for name, value in ours.items():
        if isinstance(value, Mapping):
            yield from ((f"{name} {cell}", _ratio(value[cell], theirs[name].get(cell))) for cell in value)
        elif same_load:
            yield name, _ratio(value, theirs.get(name))


def _ratio(ours: float, theirs: float | None) -> float | None:
    if not theirs:
        return 1.0 if theirs == ours else None
    return round(ours / theirs, 4)


def as_lines(compared: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> Iterator[str]:
    """For a person: what is too far off is marked."""
    near = total = 0
    for workload, rows in compared.items():
        for row, figures in rows.items():
            for name, ratio in figures.items():
                good = ratio is not None and abs(ratio - 1) <= NEAR
                near, total = near + good, total + 1
                yield f"{workload:>16} {row:>20} {name:>28} {_text(ratio)}{'' if good else '  <-- beyond 15 %'}"
    yield f"{near} of {total} figures within {NEAR:.0%} of the measured ones"


def _text(ratio: float | None) -> str:
    return "none measured" if ratio is None else f"{ratio:.3f}"
