"""Draws load runs: `python -m benchmarks.pictures benchmarks/results/load-*.json --out pictures`.

For each run it draws the distribution of every latency, with a curve for each rate; for each workload goodput against
rate, with a curve for each run; and for a strategy table (`benchmarks.strategies`, `benchmarks.simulation`) goodput
against rate for each workload, with a curve for each row. It needs matplotlib (`pip install -e '.[dev]'`).
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.load.sweep import GOODPUT_SHARE
from tandem.cli.load.pictures import GRID, Run, by_rate, draw_latencies, panels_of, run_of, save
from tandem.protocol.errors import InvalidArgument, TandemError

_LEGEND_COLUMNS, _LEGEND_HEIGHT = 4, 0.7
_MARKERS = "osv^Dx*"
"""Hollow, distinct markers: many curves coincide below the knee."""


@dataclass(frozen=True, slots=True)
class Table:
    """A result of `benchmarks.strategies`: its label, and a run for each row by workload."""

    label: str
    workloads: Mapping[str, Sequence[Run]]


def read(file: Path, label: str = "") -> Run | Table:
    """Reads a result. InvalidArgument if `file` is not a result of loads."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        name = label or file.stem
        return make_table(name, result) if "tables" in result else run_of(name, result)
    except OSError as error:
        raise InvalidArgument(file.name, f"cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise InvalidArgument(file.name, "is no result of benchmarks.load, nor of strategies with its loads") from None


def make_table(label: str, result: Mapping[str, Any]) -> Table:
    """Returns the runs of the rows in `tables`, from their `loads`."""
    return Table(
        label,
        {
            workload: [Run(row, workload, (), by_rate(result["loads"][workload][row])) for row in table["rows"]]
            for workload, table in result["tables"].items()
        },
    )


def draw_goodput(runs: Sequence[Run], file: Path) -> None:
    """Draws goodput against the offered rate for runs of one workload, one panel for each SLO cell that all have."""
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


def draw(runs: Sequence[Run], folder: Path, suffix: str) -> list[Path]:
    """Draws all pictures of `runs`; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    workloads: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        files.append(folder / f"latency-{run.label}.{suffix}")
        draw_latencies(run, files[-1])
        workloads[run.workload].append(run)
    for workload, together in workloads.items():
        files.append(folder / f"goodput-{workload}.{suffix}")
        draw_goodput(together, files[-1])
    return files


def draw_table(table: Table, folder: Path, suffix: str) -> list[Path]:
    """Draws a picture for each workload; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {workload: folder / f"{table.label}-{workload}.{suffix}" for workload in table.workloads}
    for workload, file in files.items():
        draw_goodput(table.workloads[workload], file)
    return list(files.values())


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws the results that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pictures", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument(
        "results", type=Path, nargs="+", help="files that --save of benchmarks.load, strategies or simulation kept"
    )
    parser.add_argument("--labels", default=None, help="names of the runs in the pictures, separated by commas")
    parser.add_argument("--out", type=Path, default=Path(), help="folder; it is made")
    parser.add_argument("--format", default="svg", choices=("svg", "png"))
    parsed = parser.parse_args(arguments)
    labels = parsed.labels.split(",") if parsed.labels else [""] * len(parsed.results)
    try:
        if len(labels) != len(parsed.results):
            raise InvalidArgument("--labels", f"{len(labels)} for {len(parsed.results)} results; give one for each")
        found = [read(file, label) for file, label in zip(parsed.results, labels, strict=True)]
    except TandemError as error:
        raise SystemExit(error.message) from None
    files = draw([each for each in found if isinstance(each, Run)], parsed.out, parsed.format)
    for table in found:
        if isinstance(table, Table):
            files += draw_table(table, parsed.out, parsed.format)
    for file in files:
        print("wrote", file.name)


if __name__ == "__main__":
    main()
