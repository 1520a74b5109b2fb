"""The state and the activity of a cluster, computed from two scrapes of all its processes.

`tandem top` and `tandem why` print it, and the router's page shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.metrics import families as f
from tandem.metrics.bottlenecks import diagnose
from tandem.metrics.family import Family
from tandem.metrics.scrape import Scrape, ScrapeInterval
from tandem.metrics.worker_figures import figures_of

OUTCOMES = ("met", "missed_ttft", "missed_itl", "rejected", "failed")
"""The outcomes of requests with an SLO class, as the metrics name them."""
_ROUTER = "router"
_LATENCIES = (
    ("first token", f.TIME_TO_FIRST_TOKEN),
    ("between tokens", f.INTER_TOKEN_LATENCY),
    ("whole answer", f.E2E_REQUEST_LATENCY),
    ("queue", f.QUEUE_TIME),
    ("prefill", f.PREFILL_TIME),
    ("transfer", f.TRANSFER_TIME),
    ("decode", f.DECODE_TIME),
    ("stall", f.STALL_TIME),
)
PHASES = frozenset({"queue", "prefill", "transfer", "decode", "stall"})
"""The names of the latencies that are phases of the whole answer."""
_FAMILIES = (
    f.BANDWIDTH_UTILIZATION, f.BATCH_LIMIT, f.DEVICE_BANDWIDTH, f.DEVICE_FLOPS, f.FLOPS_UTILIZATION,
    f.GENERATION_TOKENS, f.GOODPUT, f.KV_PAGES, f.KV_REFUSALS, f.KV_USAGE, f.OPEN_LEASES, f.PREEMPTIONS,
    f.PREFIX_HITS, f.PREFIX_QUERIES, f.PROCESS_RESTARTS, f.PROCESS_UP, f.REQUESTS_RUNNING, f.REQUESTS_WAITING,
    f.REQUEST_SUCCESS, f.SLO_MISSED, f.SLO_REQUESTS, f.STEP_BUSY, f.STEP_BYTES, f.STEP_COLLECTIVES,
    f.STEP_DECODE_ROWS, f.STEP_FLOPS, f.STEP_SECONDS, f.STEP_TOKENS, f.TARGET_UP, f.TRANSFER_BYTES,
    f.TRANSFER_WRITING, f.TRANSPORT_WARNINGS, f.WORKER_READY, *(family for _, family in _LATENCIES),
)  # fmt: skip
_SAMPLES = frozenset(
    [family.full_name + suffix for family in _FAMILIES for suffix in ("", "_count", "_sum")]
    + [f"{family.full_name}_bucket" for _, family in _LATENCIES]
)
"""The names of all samples that a view is computed from."""
_SEE_LOG = "`tandem status` and its log say why"


@dataclass(frozen=True, slots=True)
class ClassView:
    """The requests of one SLO class."""

    slo_class: str
    goodput_per_s: float
    """Requests per second of the last minute that met their targets."""
    outcomes: dict[str, int]
    """Number of requests since the router's start, by outcome (`OUTCOMES`)."""
    missed_in: dict[str, int]
    """Number of requests since the router's start that missed their targets, by the phase that made them miss.

    The phase with the highest number is first.
    """


@dataclass(frozen=True, slots=True)
class LatencyView:
    """A latency of the requests that ended in the interval, in seconds; None without a request."""

    name: str
    mean_s: float | None
    p50_s: float | None
    p99_s: float | None
    count: int


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker that the controller supervises. Rates are means of the interval; the rest is as at its end."""

    worker: str
    role: str
    state: str
    """"up", "down", "unresponsive", "not ready" or "slow transport"."""
    running: int
    """Number of requests in its batch."""
    waiting: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    step_s: float | None
    """Mean duration of a step; None without steps."""
    busy: float
    """Share of the time that was spent in steps."""
    kv_used: float
    """Share of the KV pages in use or reserved."""
    prefix_hits: float | None
    """Share of the prompt tokens whose KV was cached; None without prompts."""
    bandwidth_utilization: float
    flops_utilization: float
    sent_bytes_per_s: float
    """Bytes of KV that it transfers to other workers."""
    restarts: int


@dataclass(frozen=True, slots=True)
class Finding:
    """The bottleneck of one worker, the figures behind it, and the change that would help most."""

    worker: str
    bottleneck: str
    """The value of a `Bottleneck`, or the state of a worker that does not serve."""
    because: str
    change: str


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The whole cluster. Rates and latencies are of the interval; the rest is as at its end."""

    models: tuple[str, ...]
    processes_up: int
    processes: int
    running: int
    """Number of requests that the routers have placed on workers."""
    waiting: int
    """Number of requests in the routers' queues."""
    requests_per_s: float
    tokens_per_s: float
    seconds: float
    """Length of the interval."""
    classes: tuple[ClassView, ...]
    """The SLO classes that have had requests."""
    latencies: tuple[LatencyView, ...]
    workers: tuple[WorkerView, ...]
    findings: tuple[Finding, ...]


def view_scrape(text: str, at_s: float) -> Scrape:
    """Return a scrape of only the samples that `cluster_view` reads, about a seventh of those of a worker."""
    kept = (line for line in text.splitlines() if line[:1] == "#" or line.partition("{")[0] in _SAMPLES)
    return Scrape("\n".join((*kept, "")), at_s)


def cluster_view(interval: ScrapeInterval) -> ClusterView:
    """Return the cluster's activity in this interval and its state at the end."""
    now, router = interval.now, {"role": _ROUTER}
    supervised = now.values(f.PROCESS_UP, "worker")
    classes = (_class(interval, name) for name in now.values(f.SLO_REQUESTS, "slo_class"))
    return ClusterView(
        models=tuple(now.values(f.PROCESS_UP, "model")),
        processes_up=int(now.total(f.PROCESS_UP)),
        processes=len(supervised),
        running=int(now.total(f.REQUESTS_RUNNING, **router)),
        waiting=int(now.total(f.REQUESTS_WAITING, **router)),
        requests_per_s=interval.rate(f.REQUEST_SUCCESS),
        tokens_per_s=interval.rate(f.GENERATION_TOKENS),
        seconds=interval.seconds,
        classes=tuple(one for one in classes if any(one.outcomes.values())),
        latencies=tuple(_latency(interval, name, family) for name, family in _LATENCIES),
        workers=tuple(_worker(interval, name) for name in _supervised_workers(now)),
        findings=findings(interval),
    )


def findings(interval: ScrapeInterval) -> tuple[Finding, ...]:
    """Return what limits each worker that is supervised or reports metrics."""
    return tuple(_finding(interval, name) for name in workers_of(interval.now))


def workers_of(now: Scrape) -> list[str]:
    """Return the ids of all workers that the controller supervises or that report metrics."""
    return list(dict.fromkeys([*_supervised_workers(now), *now.values(f.WORKER_READY, "worker")]))


def _supervised_workers(now: Scrape) -> list[str]:
    supervised = now.values(f.PROCESS_UP, "worker")
    return [name for name in supervised if _ROUTER not in now.values(f.PROCESS_UP, "role", worker=name)]


def _class(interval: ScrapeInterval, name: str) -> ClassView:
    now = interval.now
    phases = now.values(f.SLO_MISSED, "phase", slo_class=name)
    missed = {phase: int(now.total(f.SLO_MISSED, slo_class=name, phase=phase)) for phase in phases}
    worst = sorted((phase for phase in phases if missed[phase]), key=lambda phase: -missed[phase])
    return ClassView(
        name,
        now.total(f.GOODPUT, slo_class=name),
        {outcome: int(now.total(f.SLO_REQUESTS, slo_class=name, outcome=outcome)) for outcome in OUTCOMES},
        {phase: missed[phase] for phase in worst},
    )


def _latency(interval: ScrapeInterval, name: str, family: Family) -> LatencyView:
    p50_s, p99_s = (interval.quantile(family, part) for part in (0.5, 0.99))
    return LatencyView(name, interval.mean(family), p50_s, p99_s, int(interval.grown(family, "_count")))


def _worker(interval: ScrapeInterval, name: str) -> WorkerView:
    now, me = interval.now, {"worker": name}
    queries = interval.grown(f.PREFIX_QUERIES, **me)
    return WorkerView(
        worker=name,
        role=now.values(f.PROCESS_UP, "role", **me)[0],
        state=_state(now, name),
        running=int(now.total(f.REQUESTS_RUNNING, **me)),
        waiting=int(now.total(f.REQUESTS_WAITING, **me)),
        decode_tokens_per_s=interval.rate(f.STEP_TOKENS, phase="decode", **me),
        prefill_tokens_per_s=interval.rate(f.STEP_TOKENS, phase="prefill", **me),
        step_s=interval.mean(f.STEP_SECONDS, **me),
        busy=min(1.0, interval.rate(f.STEP_BUSY, **me)),
        kv_used=now.total(f.KV_USAGE, **me),
        prefix_hits=interval.grown(f.PREFIX_HITS, **me) / queries if queries else None,
        bandwidth_utilization=now.total(f.BANDWIDTH_UTILIZATION, **me),
        flops_utilization=now.total(f.FLOPS_UTILIZATION, **me),
        sent_bytes_per_s=interval.rate(f.TRANSFER_BYTES, **me),
        restarts=int(now.total(f.PROCESS_RESTARTS, **me)),
    )


def _state(now: Scrape, worker: str) -> str:
    if not now.total(f.PROCESS_UP, worker=worker):
        return "down"
    if not now.total(f.TARGET_UP, worker=worker):
        return "unresponsive"
    if not now.total(f.WORKER_READY, worker=worker):
        return "not ready"
    return "slow transport" if now.total(f.TRANSPORT_WARNINGS, worker=worker) else "up"


def _finding(interval: ScrapeInterval, worker: str) -> Finding:
    now = interval.now
    if worker not in now.values(f.WORKER_READY, "worker"):
        state = "unresponsive" if now.total(f.PROCESS_UP, worker=worker) else "down"
        return Finding(worker, state, "it reports no metrics", _SEE_LOG)
    if not now.total(f.WORKER_READY, worker=worker):
        return Finding(worker, "not ready", "it takes no new requests", _SEE_LOG)
    diagnosis = diagnose(figures_of(interval, worker))
    return Finding(worker, diagnosis.bottleneck.value, diagnosis.because, diagnosis.change)
