"""Plots a strategy table: goodput against rate, one picture per workload and one curve per row. Requires matplotlib."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.sweep import GOODPUT_SHARE
from tandem.cli.load.pictures import GRID, Run, by_rate, panels_of, save

_LEGEND_COLUMNS, _LEGEND_HEIGHT = 4, 0.7
_MARKERS = "osv^Dx*"
"""Hollow, distinct markers, because many curves coincide below the knee."""


@dataclass(frozen=True, slots=True)
class Table:
    """A result of `benchmarks.strategies`: its label and, for each workload, one run per row."""

    label: str
    workloads: Mapping[str, Sequence[Run]]


def make_table(label: str, result: Mapping[str, Any]) -> Table:
    """Return the runs of the rows in the result's `tables`, built from their `loads`."""
    return Table(
        label,
        {
            workload: [Run(row, workload, (), by_rate(result["loads"][workload][row])) for row in table["rows"]]
            for workload, table in result["tables"].items()
        },
    )


def draw_goodput(runs: Sequence[Run], file: Path) -> None:
    """Plot goodput against the offered rate for runs of one workload, one panel per SLO cell that all of them have."""
    cells = [cell for cell in runs[0].loads[0]["goodput"] if all(cell in run.loads[0]["goodput"] for run in runs)]
    figure, panels = panels_of(len(cells))
    offered = sorted({load["offered_per_s"] for run in runs for load in run.loads})
    for axes, cell in zip(panels, cells, strict=True):
        for run, marker in zip(runs, cycle(_MARKERS), strict=False):
            goodput = [load["goodput"][cell]["per_s"] for load in run.loads]
            rates = [load["offered_per_s"] for load in run.loads]
            axes.plot(rates, goodput, marker=marker, fillstyle="none", label=run.label)
        kept = [GOODPUT_SHARE * rate for rate in offered]
        axes.plot(offered, kept, color="grey", linestyle=":", label=f"{GOODPUT_SHARE:.0%} of all requests")
        axes.set(title=cell, xlabel="offered requests/s", ylabel="requests/s that met the cell", ylim=(0, None))
        axes.grid(visible=True, alpha=GRID)
    figure.set_figheight(figure.get_figheight() + _LEGEND_HEIGHT)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=_LEGEND_COLUMNS)
    save(figure, f"workload {runs[0].workload}", file)


def draw_table(table: Table, folder: Path, suffix: str) -> list[Path]:
    """Draw one picture per workload, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {workload: folder / f"{table.label}-{workload}.{suffix}" for workload in table.workloads}
    for workload, file in files.items():
        draw_goodput(table.workloads[workload], file)
    return list(files.values())
