"""The view of `tandem top`: a summary line, and tables of SLO classes, latencies and workers."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tandem.metrics import families as f
from tandem.metrics.scrape import ScrapeInterval

_NONE = "-"
_MS, _PERCENT, _MEGA = 1e3, 100.0, 1e6
_LATENCIES = (
    ("first token", f.TIME_TO_FIRST_TOKEN),
    ("between tokens", f.INTER_TOKEN_LATENCY),
    ("whole answer", f.E2E_REQUEST_LATENCY),
    ("  queue", f.QUEUE_TIME),
    ("  prefill", f.PREFILL_TIME),
    ("  transfer", f.TRANSFER_TIME),
    ("  decode", f.DECODE_TIME),
    ("  stall", f.STALL_TIME),
)
_OUTCOMES = {
    "met": "met", "missed_ttft": "missed TTFT", "missed_itl": "missed ITL", "shed": "rejected", "failed": "failed"
}  # fmt: skip
"""The headings of the outcomes of requests."""


def picture(interval: ScrapeInterval) -> Group:
    """Return the cluster's activity in this interval and its state at the end."""
    gap = Text()
    return Group(_summary(interval), gap, _classes(interval), gap, _latencies(interval), gap, _workers(interval))


def _summary(interval: ScrapeInterval) -> Text:
    now, router = interval.now, {"role": "router"}
    kept = now.values(f.PROCESS_UP, "worker")
    parts = (
        ", ".join(now.values(f.PROCESS_UP, "model")) or "no cluster",
        f"{now.total(f.PROCESS_UP):.0f} of {len(kept)} processes up",
        f"{now.total(f.REQUESTS_RUNNING, **router):.0f} running, {now.total(f.REQUESTS_WAITING, **router):.0f} waiting",
        f"{interval.rate(f.REQUEST_SUCCESS):.1f} requests/s, {interval.rate(f.GENERATION_TOKENS):.0f} tokens/s",
    )
    return Text("   ".join(parts), style="bold")


def _classes(interval: ScrapeInterval) -> Table:
    table = _table("Service classes since the router's start; goodput of the last minute")
    for column in ("class", "goodput/s", "SLO attainment", *_OUTCOMES.values(), "missed in"):
        table.add_column(column, justify="left" if column in ("class", "missed in") else "right")
    for name in interval.now.values(f.SLO_REQUESTS, "slo_class"):
        counts = [interval.now.total(f.SLO_REQUESTS, slo_class=name, outcome=outcome) for outcome in _OUTCOMES]
        if any(counts):
            rate = interval.now.total(f.GOODPUT, slo_class=name)
            attained = f"{counts[0] / sum(counts):.0%}"
            table.add_row(
                name, f"{rate:.2f}", attained, *(f"{count:.0f}" for count in counts), _missed_in(interval, name)
            )
    return table


def _table(about: str) -> Table:
    return Table(title=about, title_justify="left", title_style="dim", box=None, pad_edge=False)


def _missed_in(interval: ScrapeInterval, name: str) -> str:
    """Return the phases that made requests of an SLO class miss their targets since the router's start, with counts.

    The phase with the highest count is first.
    """
    phases = interval.now.values(f.SLO_MISSED, "phase", slo_class=name)
    missed = {phase: interval.now.total(f.SLO_MISSED, slo_class=name, phase=phase) for phase in phases}
    worst = sorted((phase for phase in phases if missed[phase]), key=lambda phase: -missed[phase])
    return ", ".join(f"{phase} {missed[phase]:.0f}" for phase in worst) or _NONE


def _latencies(interval: ScrapeInterval) -> Table:
    table = _table(f"Latencies of the last {interval.seconds:.0f} s")
    for column in ("ms", "mean", "p50", "p99", "count"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    for name, family in _LATENCIES:
        quantiles = (interval.quantile(family, part) for part in (0.5, 0.99))
        figures = (_scaled(seconds, _MS) for seconds in (interval.mean(family), *quantiles))
        table.add_row(name, *figures, f"{interval.grown(family, '_count'):.0f}")
    return table


def _workers(interval: ScrapeInterval) -> Table:
    table = Table(box=None, pad_edge=False)
    columns = (
        "worker", "role", "state", "batch", "waiting", "decode/s", "prefill/s", "step ms", "busy %", "KV %", "hit %",
        "MBU %", "MFU %", "sent MB/s", "restarts",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:3] else "right", no_wrap=True)
    now = interval.now
    for name in now.values(f.PROCESS_UP, "worker"):
        me = {"worker": name}
        (role,) = now.values(f.PROCESS_UP, "role", **me)
        if role == "router":
            continue
        queries = interval.grown(f.PREFIX_QUERIES, **me)
        table.add_row(
            name,
            role,
            _state(interval, name),
            f"{now.total(f.REQUESTS_RUNNING, **me):.0f}",
            f"{now.total(f.REQUESTS_WAITING, **me):.0f}",
            f"{interval.rate(f.STEP_TOKENS, phase='decode', **me):.0f}",
            f"{interval.rate(f.STEP_TOKENS, phase='prefill', **me):.0f}",
            _scaled(interval.mean(f.STEP_SECONDS, **me), _MS),
            f"{min(1.0, interval.rate(f.STEP_BUSY, **me)) * _PERCENT:.0f}",
            f"{now.total(f.KV_USAGE, **me) * _PERCENT:.0f}",
            _scaled(interval.grown(f.PREFIX_HITS, **me) / queries if queries else None, _PERCENT),
            f"{now.total(f.BANDWIDTH_UTILIZATION, **me) * _PERCENT:.0f}",
            f"{now.total(f.FLOPS_UTILIZATION, **me) * _PERCENT:.0f}",
            f"{interval.rate(f.TRANSFER_BYTES, **me) / _MEGA:.1f}",
            f"{now.total(f.PROCESS_RESTARTS, **me):.0f}",
        )
    return table


def _state(interval: ScrapeInterval, worker: str) -> str:
    now = interval.now
    if not now.total(f.PROCESS_UP, worker=worker):
        return "down"
    if not now.total(f.TARGET_UP, worker=worker):
        return "unresponsive"
    if not now.total(f.WORKER_READY, worker=worker):
        return "not ready"
    return "slow transport" if now.total(f.TRANSPORT_WARNINGS, worker=worker) else "up"


def _scaled(value: float | None, scale: float) -> str:
    return _NONE if value is None else f"{value * scale:.1f}"
