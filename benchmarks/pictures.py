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

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.load.sweep import GOODPUT_SHARE
from wire.errors import InvalidArgument, TandemError

_LATENCIES = {
    "ttft_ms": "time to first token",
    "gap_ms": "gap between tokens",
    "worst_decile_gap_ms": "worst tenth of a request's gaps, mean",
    "tpot_ms": "time per output token",
    "end_to_end_ms": "end to end",
}
_PANEL = (4.6, 3.4)
_GRID = 0.3
_LEGEND_COLUMNS, _LEGEND_HEIGHT = 4, 0.7
_MARKERS = "osv^Dx*"
"""Hollow, distinct markers: many curves coincide below the knee."""
_LEAST_MS = 0.05
"""Start of logarithmic axes in ms, since tokens of one message have gaps of 0."""

Load = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """A result of `benchmarks.load`: its label, workload, and loads by ascending rate."""

    label: str
    workload: str
    levels: tuple[float, ...]
    loads: tuple[Load, ...]


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
        return make_table(name, result) if "tables" in result else _make_run(name, result)
    except OSError as error:
        raise InvalidArgument(file.name, f"cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise InvalidArgument(file.name, "is no result of benchmarks.load, nor of strategies with its loads") from None


def _make_run(label: str, result: Mapping[str, Any]) -> Run:
    return Run(label, result["workload"], tuple(result["curve_levels"]), _by_rate(result["loads"]))


def make_table(label: str, result: Mapping[str, Any]) -> Table:
    """Returns the runs of the rows in `tables`, from their `loads`."""
    return Table(
        label,
        {
            workload: [Run(row, workload, (), _by_rate(result["loads"][workload][row])) for row in table["rows"]]
            for workload, table in result["tables"].items()
        },
    )


def _by_rate(loads: Sequence[Load]) -> tuple[Load, ...]:
    return tuple(sorted(loads, key=lambda load: float(load["rate"])))


def draw_latencies(run: Run, file: Path) -> None:
    """Draws the distributions of all latencies, one panel each, with logarithmic time."""
    figure, panels = _panels(len(_LATENCIES))
    for axes, (key, title) in zip(panels, _LATENCIES.items(), strict=True):
        for load in run.loads:
            if curve := load[key]["curve"]:
                times = [max(_LEAST_MS, each) for each in curve]
                axes.plot(times, [level / 100 for level in run.levels], label=_rate(load))
        axes.set(title=title, xlabel="ms", ylabel="share", xscale="log", ylim=(0, 1.02))
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        _finish(axes)
    _save(figure, run.workload, file)


def draw_goodput(runs: Sequence[Run], file: Path) -> None:
    """Draws goodput against the offered rate for runs of one workload, one panel for each SLO cell that all have."""
    cells = [cell for cell in runs[0].loads[0]["goodput"] if all(cell in run.loads[0]["goodput"] for run in runs)]
    figure, panels = _panels(len(cells))
    offered = sorted({load["offered_per_s"] for run in runs for load in run.loads})
    for axes, cell in zip(panels, cells, strict=True):
        for run, marker in zip(runs, cycle(_MARKERS), strict=False):
            goodput = [load["goodput"][cell]["per_s"] for load in run.loads]
            rates = [load["offered_per_s"] for load in run.loads]
            axes.plot(rates, goodput, marker=marker, fillstyle="none", label=run.label)
        kept = [GOODPUT_SHARE * rate for rate in offered]
        axes.plot(offered, kept, color="grey", linestyle=":", label=f"{GOODPUT_SHARE:.0%} of all requests")
        axes.set(title=cell, xlabel="offered requests/s", ylabel="requests/s that met the cell", ylim=(0, None))
        axes.grid(visible=True, alpha=_GRID)
    figure.set_figheight(figure.get_figheight() + _LEGEND_HEIGHT)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=_LEGEND_COLUMNS)
    _save(figure, f"workload {runs[0].workload}", file)


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(3, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(_PANEL[0] * columns, _PANEL[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(count)]


def _rate(load: Load) -> str:
    return f"{load['rate']:g}/s" + ("" if load["valid"] else " (clients late)")


def _finish(axes: Axes) -> None:
    axes.grid(visible=True, alpha=_GRID)
    axes.legend(fontsize="small")


def _save(figure: Figure, title: str, file: Path) -> None:
    """Saves the figure; equal results give equal bytes."""
    figure.suptitle(title)
    with mpl.rc_context({"svg.hashsalt": file.stem}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


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
