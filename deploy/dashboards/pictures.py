"""Plots the dashboards with data of a real run: `python -m deploy.dashboards.pictures`.

The script starts a cluster on this host's CPU and a Prometheus that scrapes it, sends two minutes of mixed load, and
then draws every dashboard of `deploy/dashboards/` with Prometheus' data. With `--prometheus HOST:PORT` it draws that
server's data of the last `--seconds`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from deploy.dashboards.mixed_load import run_mixed
from deploy.dashboards.panel_axes import draw_panel
from deploy.dashboards.panels import TimeRange, names, read_dashboard, show
from deploy.prometheus.server import Prometheus, running_prometheus
from tandem.cli.load.target import find_target, touch
from tandem.cli.models.default_model import find_default_model
from tandem.cluster.launcher import Cluster
from tandem.engine.weights.gguf import prepare_model
from tandem.protocol.errors import TandemError
from tandem.settings.cluster import ClusterSettings
from tandem.settings.planner import PlannerMode, PlannerSettings

OUT = Path(__file__).parents[2] / "docs" / "pictures"
_PROCESSES, _SEED, _DPI = 3, 31, 80
_COLUMNS, _WIDTH_IN, _LINE_IN = 24, 19.0, 0.27
_MARGIN_X, _MARGIN_TOP, _MARGIN_BOTTOM = 0.045, 0.9, 0.8
"""Margins around each panel: left and right as a fraction of the figure's width, above and below in grid lines."""
_HEAD_LINES = 2
_POINTS = 150


def draw(dashboard: dict[str, Any], prometheus: Prometheus, time_range: TimeRange, file: Path) -> None:
    """Draw one dashboard, with each panel at its position in Grafana."""
    lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"]) + _HEAD_LINES + 1
    figure = Figure(figsize=(_WIDTH_IN, lines * _LINE_IN), facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.01, 1 - 0.8 / lines, dashboard["title"], fontsize=15, weight="bold", va="center")
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            folded = " (folded: no such hardware here)" if panel["collapsed"] else ""
            height = 1 - (panel["gridPos"]["y"] + _HEAD_LINES + 0.5) / lines
            figure.text(0.01, height, panel["title"] + folded, fontsize=11, weight="bold", va="center", color="#444444")
    for shown in show(dashboard, prometheus, time_range):
        axes = figure.add_axes(_place(shown.panel["gridPos"], lines))
        draw_panel(axes, shown, time_range)
    figure.savefig(file, dpi=_DPI)


def _place(place: dict[str, int], lines: int) -> tuple[float, float, float, float]:
    """Return a panel's left, bottom, width and height as fractions of the figure, for its `place` in Grafana."""
    top = place["y"] + _HEAD_LINES
    return (
        place["x"] / _COLUMNS + _MARGIN_X * 0.8,
        1 - (top + place["h"] - _MARGIN_BOTTOM) / lines,
        place["w"] / _COLUMNS - _MARGIN_X,
        (place["h"] - _MARGIN_TOP - _MARGIN_BOTTOM) / lines,
    )


@contextmanager
def _own_run(arguments: argparse.Namespace) -> Iterator[tuple[Prometheus, float]]:
    """Run a cluster under load, and yield a Prometheus that has scraped it and the load's start in Unix seconds."""
    config = ClusterSettings.of(
        prepare_model(find_default_model()),
        dtype="float32",
        page_tokens=16,
        max_step_tokens=512,
        threads=1,
        planner=PlannerSettings(PlannerMode.DRY_RUN, window_s=5.0),
        grpc_port=0,
        http_port=0,
    )
    with tempfile.TemporaryDirectory(prefix="tandem-prometheus-") as folder, ExitStack() as stack:
        cluster = Cluster.start(config)
        stack.callback(cluster.stop)
        prometheus = stack.enter_context(running_prometheus(cluster.endpoints.metrics, Path(folder)))
        target = find_target(cluster.endpoints.grpc)
        touch(target)
        prometheus.await_scrape(_PROCESSES)
        start = time.time()
        run_mixed(target, arguments.seconds, _SEED)
        prometheus.await_scrape(_PROCESSES)
        yield prometheus, start


@contextmanager
def _run(arguments: argparse.Namespace) -> Iterator[tuple[Prometheus, float]]:
    if arguments.prometheus:
        yield Prometheus(arguments.prometheus), time.time() - arguments.seconds
    else:
        with _own_run(arguments) as run:
            yield run


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw all dashboards."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.dashboards.pictures", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--prometheus", default="", help="host:port of a running one; else one is started")
    parser.add_argument("--seconds", type=float, default=120.0, help="of load, or of the past")
    parser.add_argument("--rate-interval", type=int, default=15, help="seconds that rates are taken over")
    parser.add_argument("--out", type=Path, default=OUT, help="folder; it is made")
    parsed = parser.parse_args(arguments)
    try:
        with _run(parsed) as (prometheus, start):
            end = time.time()
            time_range = TimeRange(start, end, parsed.rate_interval, max(1.0, (end - start) / _POINTS))
            parsed.out.mkdir(parents=True, exist_ok=True)
            for name in names():
                draw(read_dashboard(name), prometheus, time_range, parsed.out / f"{name}.png")
                print("wrote", f"{name}.png")
    except TandemError as error:
        raise SystemExit(error.message) from None


if __name__ == "__main__":
    main()
