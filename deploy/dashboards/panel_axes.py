"""Plots one panel of a dashboard with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, Formatter, FuncFormatter

from deploy.dashboards.panels import Curve, Shown, TimeRange

_SCALED = {"s": "s", "bytes": "B", "Bps": "B/s", "flops": "FLOP/s"}
"""Axis text of the Grafana units that are shown with SI prefixes; `_PLAIN` has the units without prefixes."""
_PLAIN = {"reqps": "req/s", "cps": "/s"}
_SMALL, _TITLE, _BIG = 6.5, 9, 20
_LEGEND_MAX = 8


def draw_panel(axes: Axes, shown: Shown, time_range: TimeRange) -> None:
    """Plot a panel. Times on the axis are seconds after the start of `time_range`."""
    start = time_range.start
    axes.set_xlim(0, time_range.end - start)
    axes.set_title(shown.title, fontsize=_TITLE, loc="left")
    axes.tick_params(labelsize=_SMALL)
    curves = [curve for answer in shown.answers for curve in answer]
    unit = str(shown.panel["fieldConfig"]["defaults"]["unit"])
    match shown.panel["type"]:
        case "stat":
            _number(axes, curves, unit)
        case "table":
            _table(axes, curves)
        case "heatmap":
            _heatmap(axes, curves, start)
        case _:
            stacking = shown.panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"]
            _lines(axes, curves, unit, start, stacked=stacking == "normal")


def _lines(axes: Axes, curves: Sequence[Curve], unit: str, start: float, *, stacked: bool) -> None:
    moments = sorted({at for curve in curves for at, _ in curve.series.points})
    floor = np.zeros(len(moments))
    for curve in curves:
        values = _on(moments, curve)
        if stacked:
            top = floor + np.nan_to_num(values)
            axes.fill_between([at - start for at in moments], floor, top, alpha=0.6, linewidth=0, label=curve.name)
            floor = top
        else:
            axes.plot([at - start for at in moments], values, linewidth=1.0, label=curve.name)
    axes.set_ylim(0, None if any(value > 0 for curve in curves for _, value in curve.series.points) else 1)
    axes.yaxis.set_major_formatter(_formatter(unit))
    axes.grid(visible=True, alpha=0.25)
    if curves:
        columns = 1 if len(curves) <= _LEGEND_MAX // 2 else 2
        axes.legend(fontsize=_SMALL - 0.5, loc="upper left", ncols=columns, framealpha=0.6, borderpad=0.2)


def _number(axes: Axes, curves: Sequence[Curve], unit: str) -> None:
    axes.set_axis_off()
    last = [(curve.name, [value for _, value in curve.series.points if math.isfinite(value)]) for curve in curves]
    text = "\n".join(f"{_in_words(values[-1], unit)} {name}".strip() for name, values in last if values)
    axes.text(
        0.5,
        0.5,
        text or "no data",
        transform=axes.transAxes,
        ha="center",
        va="center",
        fontsize=_BIG if len(last) == 1 else _BIG / 2,
    )


def _table(axes: Axes, curves: Sequence[Curve]) -> None:
    axes.set_axis_off()
    for line, curve in enumerate(curves):
        axes.text(
            0.0, 0.9 - 0.15 * line, curve.name, transform=axes.transAxes, fontsize=_TITLE, va="top", family="monospace"
        )


def _heatmap(axes: Axes, curves: Sequence[Curve], start: float) -> None:
    """Draw a histogram's buckets over time, as a heat map.

    Prometheus' buckets are cumulative, so the counts of the next lower bucket are subtracted from each. The last bucket
    has no upper bound and is not drawn.
    """
    rising = sorted(curves, key=lambda curve: float(curve.name))
    moments = sorted({at for curve in rising for at, _ in curve.series.points})
    if len(rising) < 2 or len(moments) < 2:
        return
    heights = np.diff([np.nan_to_num(_on(moments, curve)) for curve in rising], axis=0, prepend=0.0)
    bounds = [float(curve.name) for curve in rising[:-1]]
    edges = [bounds[0] / 2, *bounds]
    axes.pcolormesh(
        [at - start for at in moments], edges, np.clip(heights[:-1, :-1], 0, None), cmap="Oranges", shading="flat"
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_formatter("s"))


def _on(moments: Sequence[float], curve: Curve) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the curve's values at the given Unix times; NaN where the curve has no finite value."""
    have = dict(curve.series.points)
    values = [have.get(at, math.nan) for at in moments]
    return np.array([value if math.isfinite(value) else math.nan for value in values])


def _formatter(unit: str) -> Formatter:
    return FuncFormatter(lambda value, _: _in_words(value, unit))


def _in_words(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit in _SCALED:
        return EngFormatter(_SCALED[unit]).format_data(value)
    return f"{value:.4g} {_PLAIN.get(unit, '')}".strip()
