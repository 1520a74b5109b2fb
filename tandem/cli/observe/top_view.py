"""The view of `tandem top`: a summary line, and tables of SLO classes, latencies and workers."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tandem.metrics.cluster_view import OUTCOMES, PHASES, ClassView, ClusterView, WorkerView, cluster_view
from tandem.metrics.scrape import ScrapeInterval

_NONE = "-"
_MS, _PERCENT, _MEGA = 1e3, 100.0, 1e6
_OUTCOME_HEADINGS = {"missed_ttft": "missed TTFT", "missed_itl": "missed ITL"}
"""The headings of outcomes that have another heading than their name."""


def picture(interval: ScrapeInterval) -> Group:
    """Return the cluster's activity in this interval and its state at the end."""
    view, gap = cluster_view(interval), Text()
    return Group(_summary(view), gap, _classes(view), gap, _latencies(view), gap, _workers(view))


def _summary(view: ClusterView) -> Text:
    parts = (
        ", ".join(view.models) or "no cluster",
        f"{view.processes_up} of {view.processes} processes up",
        f"{view.running} running, {view.waiting} waiting",
        f"{view.requests_per_s:.1f} requests/s, {view.tokens_per_s:.0f} tokens/s",
    )
    return Text("   ".join(parts), style="bold")


def _classes(view: ClusterView) -> Table:
    table = _table("Service classes since the router's start; goodput of the last minute")
    headings = (_OUTCOME_HEADINGS.get(outcome, outcome) for outcome in OUTCOMES)
    for column in ("class", "goodput/s", "SLO attainment", *headings, "missed in"):
        table.add_column(column, justify="left" if column in ("class", "missed in") else "right")
    for one in view.classes:
        counts = one.outcomes.values()
        attained = f"{one.outcomes['met'] / sum(counts):.0%}"
        table.add_row(one.slo_class, f"{one.goodput_per_s:.2f}", attained, *map(str, counts), _missed_in(one))
    return table


def _table(about: str) -> Table:
    return Table(title=about, title_justify="left", title_style="dim", box=None, pad_edge=False)


def _missed_in(one: ClassView) -> str:
    return ", ".join(f"{phase} {count}" for phase, count in one.missed_in.items()) or _NONE


def _latencies(view: ClusterView) -> Table:
    table = _table(f"Latencies of the last {view.seconds:.0f} s")
    for column in ("ms", "mean", "p50", "p99", "count"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    for latency in view.latencies:
        figures = (_scaled(seconds, _MS) for seconds in (latency.mean_s, latency.p50_s, latency.p99_s))
        indent = "  " if latency.name in PHASES else ""
        table.add_row(indent + latency.name, *figures, str(latency.count))
    return table


def _workers(view: ClusterView) -> Table:
    table = Table(box=None, pad_edge=False)
    columns = (
        "worker", "role", "state", "batch", "waiting", "decode/s", "prefill/s", "step ms", "busy %", "KV %", "hit %",
        "MBU %", "MFU %", "sent MB/s", "restarts",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:3] else "right", no_wrap=True)
    for worker in view.workers:
        table.add_row(*_worker_row(worker))
    return table


def _worker_row(worker: WorkerView) -> tuple[str, ...]:
    return (
        worker.worker,
        worker.role,
        worker.state,
        str(worker.running),
        str(worker.waiting),
        f"{worker.decode_tokens_per_s:.0f}",
        f"{worker.prefill_tokens_per_s:.0f}",
        _scaled(worker.step_s, _MS),
        f"{worker.busy * _PERCENT:.0f}",
        f"{worker.kv_used * _PERCENT:.0f}",
        _scaled(worker.prefix_hits, _PERCENT),
        f"{worker.bandwidth_utilization * _PERCENT:.0f}",
        f"{worker.flops_utilization * _PERCENT:.0f}",
        f"{worker.sent_bytes_per_s / _MEGA:.1f}",
        str(worker.restarts),
    )


def _scaled(value: float | None, scale: float) -> str:
    return _NONE if value is None else f"{value * scale:.1f}"
