"""The strategy table of one workload, and what it has to show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.strategies.part import Load, knees
from benchmarks.strategies.rows import ADAPTIVE, DISAGGREGATED, SHARED, Strategy
from wire.errors import InvalidArgument

_COLOCATED_SIGN = "colocated"


@dataclass(frozen=True, slots=True)
class Row:
    """A strategy, its loads by rising rate, and its goodput in each cell (requests/s)."""

    strategy: Strategy
    loads: Sequence[Load]
    goodput: Mapping[str, float]


def make_rows(measured: Mapping[Strategy, Sequence[Load]]) -> list[Row]:
    """One row of each kind that was measured: of several splits the one with the largest goodput over all cells."""
    best: dict[str, Row] = {}
    for strategy, loads in measured.items():
        if loads:
            row = Row(strategy, loads, knees(loads))
            rival = best.get(strategy.kind)
            if rival is None or sum(row.goodput.values()) > sum(rival.goodput.values()):
                best[strategy.kind] = row
    return list(best.values())


def common_load(rows: Sequence[Row]) -> float | None:
    """The highest rate that every row was measured at; None = there is none yet."""
    return max(set.intersection(*({float(load["rate"]) for load in row.loads} for row in rows)), default=None)


def at_rate(row: Row, rate: float) -> Load:
    """The row's load at a rate that it has."""
    return next(load for load in row.loads if load["rate"] == rate)


def figures(rows: Sequence[Row]) -> dict[str, object]:
    """Ready for JSON: the columns of each row at the common rate, goodput by cell, and the relations that count.
    InvalidArgument without such a rate.
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
        }
    return {"rate": rate, "rows": columns, "invalid_loads": invalid_loads(rows)} | relations(rows, rate)


def invalid_loads(rows: Sequence[Row]) -> list[str]:
    """Those whose clients sent late: their latencies are the clients' as well."""
    return [
        f"{row.strategy.name} at {load['rate']:g}/s"
        for row in rows
        for load in row.loads
        if not load.get("valid", True)
    ]


def relations(rows: Sequence[Row], rate: float) -> dict[str, object]:
    """Disaggregated against shared, and adaptive against the best of the others, wherever both were measured."""
    by_kind = {row.strategy.kind: row for row in rows}
    found: dict[str, object] = {}
    apart, shared, adaptive = (by_kind.get(kind) for kind in (DISAGGREGATED, SHARED, ADAPTIVE))
    if apart and shared:
        found["itl_p99_disaggregated_over_shared"] = _ratio(
            at_rate(apart, rate)["gap_ms"]["p99"], at_rate(shared, rate)["gap_ms"]["p99"]
        )
    colocated = [row for row in rows if row.strategy.settings["mode"] == _COLOCATED_SIGN]
    if apart and colocated:
        found["goodput_disaggregated_over_colocated"] = {
            cell: _ratio(apart.goodput[cell], max(row.goodput[cell] for row in colocated)) for cell in apart.goodput
        }
    others = [row for row in rows if row is not adaptive]
    if adaptive and others:
        found["goodput_adaptive_over_best"] = {
            cell: _ratio(adaptive.goodput[cell], max(row.goodput[cell] for row in others)) for cell in adaptive.goodput
        }
    return found


def _ratio(ours: float, theirs: float) -> float | None:
    """None where there is nothing to compare with."""
    return round(ours / theirs, 4) if theirs else None


def as_text(figures_of_workload: Mapping[str, object]) -> str:
    """For a terminal and for docs: a Markdown table."""
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
                *(f"{row['goodput_per_s'][cell]:.2f}" for cell in cells),
            ]
        )
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    invalid = figures_of_workload.get("invalid_loads")
    return (
        f"{table}\n\nINVALID, the clients were late: {', '.join(invalid)}"
        if isinstance(invalid, list) and invalid
        else table
    )
