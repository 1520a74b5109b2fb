"""One picture of a cluster for `tandem top`: router, promises, phases, workers, in the order of a request."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from telemetry import families as f
from telemetry.scrape import Stretch

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
_OUTCOMES = ("met", "missed_ttft", "missed_itl", "shed", "failed")


def picture(stretch: Stretch) -> Group:
    """What the cluster did in this stretch, and how it stands at its end."""
    gap = Text()
    return Group(_summary(stretch), gap, _promises(stretch), gap, _latencies(stretch), gap, _workers(stretch))


def _summary(stretch: Stretch) -> Text:
    now, router = stretch.now, {"role": "router"}
    kept = now.values(f.PROCESS_UP, "worker")
    parts = (
        ", ".join(now.values(f.PROCESS_UP, "model")) or "no cluster",
        f"{now.total(f.PROCESS_UP):.0f} of {len(kept)} processes up",
        f"{now.total(f.REQUESTS_RUNNING, **router):.0f} running, {now.total(f.REQUESTS_WAITING, **router):.0f} waiting",
        f"{stretch.rate(f.REQUEST_SUCCESS):.1f} requests/s, {stretch.rate(f.GENERATION_TOKENS):.0f} tokens/s",
    )
    return Text("   ".join(parts), style="bold")


def _promises(stretch: Stretch) -> Table:
    table = _table("Promises since the router's start; goodput of the last minute")
    for column in ("class", "goodput/s", *(each.replace("_", " ") for each in _OUTCOMES), "blame"):
        table.add_column(column, justify="left" if column in ("class", "blame") else "right")
    for name in stretch.now.values(f.SLO_REQUESTS, "slo_class"):
        counts = [stretch.now.total(f.SLO_REQUESTS, slo_class=name, outcome=each) for each in _OUTCOMES]
        if any(counts):
            rate = stretch.now.total(f.GOODPUT, slo_class=name)
            table.add_row(name, f"{rate:.2f}", *(f"{count:.0f}" for count in counts), _blame(stretch, name))
    return table


def _table(about: str) -> Table:
    return Table(title=about, title_justify="left", title_style="dim", box=None, pad_edge=False)


def _blame(stretch: Stretch, name: str) -> str:
    """The phases in which requests of a class missed it since the router started, the worst first."""
    phases = stretch.now.values(f.SLO_MISSED, "phase", slo_class=name)
    missed = {each: stretch.now.total(f.SLO_MISSED, slo_class=name, phase=each) for each in phases}
    worst = sorted((each for each in phases if missed[each]), key=lambda each: -missed[each])
    return ", ".join(f"{each} {missed[each]:.0f}" for each in worst) or _NONE


def _latencies(stretch: Stretch) -> Table:
    table = _table(f"Latencies of the last {stretch.seconds:.0f} s")
    for column in ("ms", "mean", "p50", "p99", "count"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    for name, family in _LATENCIES:
        quantiles = (stretch.quantile(family, part) for part in (0.5, 0.99))
        figures = (_scaled(each, _MS) for each in (stretch.mean(family), *quantiles))
        table.add_row(name, *figures, f"{stretch.grown(family, '_count'):.0f}")
    return table


def _workers(stretch: Stretch) -> Table:
    table = Table(box=None, pad_edge=False)
    columns = (
        "worker", "role", "state", "batch", "waiting", "decode/s", "prefill/s", "step ms", "busy %", "KV %", "hit %",
        "MBU %", "MFU %", "sent MB/s", "restarts",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:3] else "right", no_wrap=True)
    now = stretch.now
    for name in now.values(f.PROCESS_UP, "worker"):
        me = {"worker": name}
        (role,) = now.values(f.PROCESS_UP, "role", **me)
        if role == "router":
            continue
        queries = stretch.grown(f.PREFIX_QUERIES, **me)
        table.add_row(
            name,
            role,
            _state(stretch, name),
            f"{now.total(f.REQUESTS_RUNNING, **me):.0f}",
            f"{now.total(f.REQUESTS_WAITING, **me):.0f}",
            f"{stretch.rate(f.STEP_TOKENS, half='decode', **me):.0f}",
            f"{stretch.rate(f.STEP_TOKENS, half='prefill', **me):.0f}",
            _scaled(stretch.mean(f.STEP_SECONDS, **me), _MS),
            f"{min(1.0, stretch.rate(f.STEP_BUSY, **me)) * _PERCENT:.0f}",
            f"{now.total(f.KV_USAGE, **me) * _PERCENT:.0f}",
            _scaled(stretch.grown(f.PREFIX_HITS, **me) / queries if queries else None, _PERCENT),
            f"{now.total(f.BANDWIDTH_UTILIZATION, **me) * _PERCENT:.0f}",
            f"{now.total(f.FLOPS_UTILIZATION, **me) * _PERCENT:.0f}",
            f"{stretch.rate(f.TRANSFER_BYTES, **me) / _MEGA:.1f}",
            f"{now.total(f.PROCESS_RESTARTS, **me):.0f}",
        )
    return table


def _state(stretch: Stretch, worker: str) -> str:
    now = stretch.now
    if not now.total(f.PROCESS_UP, worker=worker):
        return "down"
    if not now.total(f.TARGET_UP, worker=worker):
        return "silent"
    if not now.total(f.WORKER_READY, worker=worker):
        return "not ready"
    return "slow wire" if now.total(f.TRANSPORT_WARNINGS, worker=worker) else "up"


def _scaled(value: float | None, scale: float) -> str:
    return _NONE if value is None else f"{value * scale:.1f}"
