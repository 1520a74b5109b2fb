"""The strategy table of one workload, with the relations between its rows and notes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.strategies.parts import Load, knees
from benchmarks.strategies.rows import ADAPTIVE, DISAGGREGATED, SHARED, Strategy
from benchmarks.sweep import GOODPUT_SHARE
from tandem.protocol.errors import InvalidArgument

_COLOCATED_SIGN = "colocated"
_NOT_ALIKE = "_not_swept_alike"
"""Suffix of the name of a list: the cells in which a ratio cannot be computed; the ratio's name precedes it."""


@dataclass(frozen=True, slots=True)
class Row:
    """A strategy, its loads by ascending rate, and its goodput in each cell in requests per second."""

    strategy: Strategy
    loads: Sequence[Load]
    goodput: Mapping[str, float]

    @property
    def rates(self) -> list[float]:
        """The rates of the loads, ascending."""
        return [float(load["rate"]) for load in self.loads]

    def has_knee(self, cell: str) -> bool:
        """Return True if the cell was missed at the highest rate. Otherwise its goodput is only a lower bound."""
        return bool(self.loads[-1]["goodput"][cell]["share"] < GOODPUT_SHARE)


def make_rows(measured: Mapping[Strategy, Sequence[Load]]) -> list[Row]:
    """Return one row per measured kind: of several splits, the one with the largest goodput over all cells."""
    best: dict[str, Row] = {}
    for strategy, loads in measured.items():
        if loads:
            row = Row(strategy, sorted(loads, key=lambda load: float(load["rate"])), knees(loads))
            rival = best.get(strategy.kind)
            if rival is None or sum(row.goodput.values()) > sum(rival.goodput.values()):
                best[strategy.kind] = row
    return list(best.values())


def swept_alike(rows: Sequence[Row], cell: str) -> bool:
    """Return True if the rows' goodput in the cell can be compared.

    All rows must be measured at the same rates, except beyond the knee of a row whose sweep ended there.
    """
    longest = max((row.rates for row in rows), key=len)
    return all(row.rates == longest or (row.rates == longest[: len(row.rates)] and row.has_knee(cell)) for row in rows)


def common_load(rows: Sequence[Row]) -> float | None:
    """Return the highest rate at which every row was measured; None = there is none."""
    return max(set.intersection(*(set(row.rates) for row in rows)), default=None)


def at_rate(row: Row, rate: float) -> Load:
    """Return the row's load at a measured rate."""
    return next(load for load in row.loads if load["rate"] == rate)


def figures(rows: Sequence[Row]) -> dict[str, object]:
    """Return each row's figures at the common rate, goodput by cell, knees and relations, as JSON.

    Raises InvalidArgument if there is no common rate.
    """
    rate = common_load(rows)
    if rate is None:
        raise InvalidArgument("--rates", "no rate was measured in every row; start again for what is missing")
    columns = {}
    for row in rows:
        load = at_rate(row, rate)
        columns[row.strategy.name] = {
            "ttft_p50_ms": load["ttft_ms"]["p50"],
            "ttft_p99_ms": load["ttft_ms"]["p99"],
            "itl_p50_ms": load["gap_ms"]["p50"],
            "itl_p99_ms": load["gap_ms"]["p99"],
            "tokens_per_s": load["tokens_per_s"],
            "goodput_per_s": dict(row.goodput),
            "knee": {cell: row.has_knee(cell) for cell in row.goodput},
            "rates": row.rates,
        }
    return {"rate": rate, "rows": columns, "invalid_loads": invalid_loads(rows)} | relations(rows, rate)


def invalid_loads(rows: Sequence[Row]) -> list[str]:
    """Return the loads whose clients sent late, so that latencies include delays of the clients."""
    return [
        f"{row.strategy.name} at {load['rate']:g}/s"
        for row in rows
        for load in row.loads
        if not load.get("valid", True)
    ]


def relations(rows: Sequence[Row], rate: float) -> dict[str, object]:
    """Return the ratios disaggregated ÷ colocated and adaptive ÷ the best other row, if both sides were measured."""
    by_kind = {row.strategy.kind: row for row in rows}
    ratios: dict[str, object] = {}
    apart, shared, adaptive = (by_kind.get(kind) for kind in (DISAGGREGATED, SHARED, ADAPTIVE))
    if apart and shared:
        ratios["itl_p99_disaggregated_over_shared"] = _ratio(
            at_rate(apart, rate)["gap_ms"]["p99"], at_rate(shared, rate)["gap_ms"]["p99"]
        )
    colocated = [row for row in rows if row.strategy.settings["mode"] == _COLOCATED_SIGN]
    if apart and colocated:
        ratios |= _over_best("goodput_disaggregated_over_colocated", apart, colocated)
    others = [row for row in rows if row is not adaptive]
    if adaptive and others:
        ratios |= _over_best("goodput_adaptive_over_best", adaptive, others)
    return ratios


def _over_best(name: str, ours: Row, others: Sequence[Row]) -> dict[str, object]:
    """Return the goodput of `ours` ÷ the best of `others` by cell, and the cells that cannot be compared."""
    alike = {cell: swept_alike([ours, *others], cell) for cell in ours.goodput}
    ratios = {
        cell: _ratio(goodput, max(row.goodput[cell] for row in others))
        for cell, goodput in ours.goodput.items()
        if alike[cell]
    }
    return {name: ratios, f"{name}{_NOT_ALIKE}": [cell for cell, same in alike.items() if not same]}


def _ratio(value: float, reference: float) -> float | None:
    """Return the ratio; None = the reference is missing."""
    return round(value / reference, 4) if reference else None


def as_text(figures_of_workload: Mapping[str, object]) -> str:
    """Return a Markdown table."""
    rows = figures_of_workload["rows"]
    assert isinstance(rows, dict)
    cells = list(next(iter(rows.values()))["goodput_per_s"])
    heads = ["strategy", "TTFT P50/P99 ms", "ITL P50/P99 ms", "tokens/s", *(f"goodput {cell}/s" for cell in cells)]
    lines = [heads, ["---"] * len(heads)]
    for name, row in rows.items():
        lines.append(
            [
                name,
                f"{row['ttft_p50_ms']:.0f} / {row['ttft_p99_ms']:.0f}",
                f"{row['itl_p50_ms']:.1f} / {row['itl_p99_ms']:.1f}",
                f"{row['tokens_per_s']:.0f}",
                *(_goodput_text(row, cell) for cell in cells),
            ]
        )
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([table, *_notes(figures_of_workload, rows)])


def _goodput_text(row: Mapping[str, Any], cell: str) -> str:
    return f"{'' if row['knee'][cell] else '≥ '}{row['goodput_per_s'][cell]:.2f}"


def _notes(figures_of_workload: Mapping[str, Any], rows: Mapping[str, Any]) -> Iterator[str]:
    """Yield the notes that a reader needs to compare the rows."""
    if not all(all(row["knee"].values()) for row in rows.values()):
        yield "≥: met at the highest rate that the row was measured at, so a lower bound of the knee."
    if len({tuple(row["rates"]) for row in rows.values()}) > 1:
        ends = ", ".join(f"{name} {len(row['rates'])} up to {row['rates'][-1]:g}/s" for name, row in rows.items())
        yield f"Rates of each row: {ends}."
    for name, cells in figures_of_workload.items():
        if name.endswith(_NOT_ALIKE) and cells:
            yield f"No {name.removesuffix(_NOT_ALIKE)} in {', '.join(cells)}: the rows were not swept alike."
    if invalid := figures_of_workload["invalid_loads"]:
        yield f"INVALID, the clients were late: {', '.join(invalid)}"
