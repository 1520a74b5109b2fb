"""Plots the distributions of a load's latencies. Requires matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

_LATENCIES = {
    "ttft_ms": "time to first token",
    "gap_ms": "gap between tokens",
    "worst_decile_gap_ms": "worst tenth of a request's gaps, mean",
    "tpot_ms": "time per output token",
    "end_to_end_ms": "end to end",
}
_PANEL = (4.6, 3.4)
GRID = 0.3
_LEGEND_ROOM = 1.4
"""Height of the axes of `draw_lines` ÷ that of its highest line: room for the legend."""
_LEAST_MS = 0.05
"""Start of logarithmic time axes, in ms. Tokens of one message have gaps of 0, which a logarithm cannot show."""

Load = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one run of `tandem bench`, or one row of the strategy table, with loads by ascending rate."""

    label: str
    workload: str
    levels: tuple[float, ...]
    loads: tuple[Load, ...]


def run_of(label: str, result: Mapping[str, Any]) -> Run:
    """Parse the run in the JSON of a result file. Raises KeyError if it contains none."""
    return Run(label, result["workload"], tuple(result["curve_levels"]), by_rate(result["loads"]))


def by_rate(loads: Sequence[Load]) -> tuple[Load, ...]:
    """Return the loads by ascending rate."""
    return tuple(sorted(loads, key=lambda load: float(load["rate"])))


def draw_latencies(run: Run, file: Path) -> None:
    """Draw one panel per latency with its distribution, on a logarithmic time axis."""
    figure, panels = panels_of(len(_LATENCIES))
    for axes, (key, title) in zip(panels, _LATENCIES.items(), strict=True):
        for load in run.loads:
            if curve := load[key]["curve"]:
                times = [max(_LEAST_MS, value) for value in curve]
                axes.plot(times, [level / 100 for level in run.levels], label=_rate(load))
        axes.set(title=title, xlabel="ms", ylabel="share", xscale="log", ylim=(0, 1.02))
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        _finish(axes)
    save(figure, run.workload, file)


def draw_lines(
    title: str, axes_names: tuple[str, str], lines: Mapping[str, Sequence[tuple[float, float]]], even: float, file: Path
) -> None:
    """Draw lines of (x, y) by label over a logarithmic x axis, and a dotted one at the height `even`."""
    figure, (axes,) = panels_of(1)
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=label)
    axes.axhline(even, color="grey", linestyle=":")
    highest = max(y for points in lines.values() for _, y in points)
    axes.set(xlabel=axes_names[0], ylabel=axes_names[1], xscale="log", ylim=(0, _LEGEND_ROOM * highest))
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    _finish(axes)
    save(figure, title, file)


def panels_of(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels, at most three per row."""
    columns = min(3, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(_PANEL[0] * columns, _PANEL[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(count)]


def _rate(load: Load) -> str:
    return f"{load['rate']:g}/s" + ("" if load["valid"] else " (clients late)")


def _finish(axes: Axes) -> None:
    axes.grid(visible=True, alpha=GRID)
    axes.legend(fontsize="small")


def save(figure: Figure, title: str, file: Path) -> None:
    """Save the figure. Equal results give equal bytes."""
    figure.suptitle(title)
    with mpl.rc_context({"svg.hashsalt": file.stem}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
