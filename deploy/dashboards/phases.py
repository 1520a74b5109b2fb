"""The dashboard of the phases of a request: queue, prefill, transfer and decode."""

from deploy.dashboards.grafana import Dashboard, Panel, Query, Row, Unit
from deploy.dashboards.promql import Selection, mean, of_workers, quantile, rate, series, share, total
from tandem.metrics import families as f
from tandem.metrics.family import Family

_PHASES = {
    "queue": f.QUEUE_TIME,
    "prefill": f.PREFILL_TIME,
    "transfer": f.TRANSFER_TIME,
    "decode": f.DECODE_TIME,
    "stall": f.STALL_TIME,
}


def _spread(title: str, buckets: Selection, about: str, unit: Unit = Unit.SECONDS) -> Panel:
    curves = tuple(Query(quantile(part, buckets), f"p{part * 100:g}") for part in (0.5, 0.99))
    return Panel(title, unit, curves, about, width=6)


def _phase(title: str, family: Family, about: str) -> Panel:
    return _spread(title, series(family, "_bucket"), about)


def _by_worker(title: str, unit: Unit, expression: str, about: str = "") -> Panel:
    return Panel(title, unit, (Query(expression, "{{worker}}"),), about, width=6)


_ENDED = rate(series(f.E2E_REQUEST_LATENCY, "_count"))

_ALL_PHASES = Row(
    "All phases",
    (
        Panel(
            "Mean time in each phase",
            Unit.SECONDS,
            tuple(Query(share(rate(series(family, "_sum")), _ENDED), name) for name, family in _PHASES.items()),
            "Of completed answers; they add up to the latency. Stall: a worker stopped responding, until"
            " another took over.",
            width=12,
            stacked=True,
        ),
        Panel(
            "Missed targets by phase",
            Unit.REQUESTS,
            (Query(rate(series(f.SLO_MISSED), "phase"), "{{phase}}"),),
            "The phase that made each request miss its class.",
            width=12,
            stacked=True,
        ),
    ),
)

_QUEUE = Row(
    "1. Queue",
    (
        _phase("Queue time", f.QUEUE_TIME, "At the router until placement, and in the prefill worker's queue."),
        Panel(
            "Waiting requests",
            Unit.NUMBER,
            (
                Query(total(series(f.REQUESTS_WAITING, role="router")), "router"),
                Query(total(of_workers(f.REQUESTS_WAITING), "worker"), "{{worker}}"),
            ),
            "In the router's queue, and prompts that are not fully computed.",
            width=6,
        ),
        Panel(
            "Rejected requests",
            Unit.REQUESTS,
            (Query(rate(series(f.ADMISSION_REJECTIONS), "reason"), "{{reason}}"),),
            width=6,
        ),
        Panel(
            "Prefix cache hit ratio",
            Unit.SHARE,
            (
                Query(
                    share(rate(of_workers(f.PREFIX_HITS), "worker"), rate(of_workers(f.PREFIX_QUERIES), "worker")),
                    "{{worker}}",
                ),
            ),
            "Share of the prompt tokens that were looked up.",
            width=6,
        ),
    ),
)

_PREFILL = Row(
    "2. Prefill",
    (
        _phase("Prefill time", f.PREFILL_TIME, "Time from the start of a prompt's first chunk to the end of its last."),
        _spread(
            "Steps with prompt tokens",
            of_workers(f.STEP_SECONDS, "_bucket", phase="prefill|mixed"),
            "The decoding requests of a mixed step wait for all of it.",
        ),
        _by_worker(
            "Prompt tokens computed",
            Unit.A_SECOND,
            rate(of_workers(f.STEP_TOKENS, phase="prefill"), "worker"),
        ),
        _by_worker(
            "Prompt tokens per step",
            Unit.NUMBER,
            mean(f.STEP_PREFILL_TOKENS, "worker", of="workers"),
            "Mean, of steps with any. Small values under load: weights are read for few tokens.",
        ),
    ),
)

_TRANSFER = Row(
    "3. Transfer",
    (
        _phase("Exposed transfer time", f.TRANSFER_TIME, "From the end of prefill to the decode worker's first step."),
        _spread("KV transfer time", of_workers(f.TRANSFER_SECONDS, "_bucket"), "All writes of one prompt."),
        _by_worker(
            "Concurrent KV transfers",
            Unit.NUMBER,
            rate(of_workers(f.TRANSFER_WRITING), "worker"),
            "Average number, including those that do not end.",
        ),
        _by_worker("KV transfer throughput", Unit.BYTES_A_SECOND, rate(of_workers(f.TRANSFER_BYTES), "worker")),
        _spread(
            "Bandwidth per KV transfer",
            of_workers(f.TRANSFER_BANDWIDTH, "_bucket"),
            "Bytes / seconds of the writes of one prompt.",
            Unit.BYTES_A_SECOND,
        ),
        Panel(
            "Open leases",
            Unit.NUMBER,
            (Query(total(of_workers(f.OPEN_LEASES), "worker"), "{{worker}}"),),
            "Including quarantined ones.",
            width=6,
        ),
        Panel(
            "Transfer failures",
            Unit.A_SECOND,
            (
                Query(rate(of_workers(f.TRANSFER_FAILURES)), "failed"),
                Query(rate(of_workers(f.CHECKSUM_FAILURES)), "checksum mismatch"),
                Query(rate(of_workers(f.EXPIRED_LEASES)), "leases expired"),
                Query(rate(of_workers(f.FENCED)), "fenced"),
            ),
            "Clients do not see these: the prompt is computed again.",
            width=12,
        ),
        Panel(
            "Transport warnings",
            Unit.NUMBER,
            (Query(total(of_workers(f.TRANSPORT_WARNINGS), "worker"), "{{worker}}"),),
            "For example TCP between GPUs; `tandem status` gives the remedy.",
            width=12,
        ),
    ),
)

_DECODE = Row(
    "4. Decode",
    (
        _phase("Decode time", f.DECODE_TIME, "From the decode worker's first step to the end."),
        _spread("Decode step time", of_workers(f.STEP_SECONDS, "_bucket", phase="decode"), "Steps without prompts."),
        _by_worker(
            "Decode batch size", Unit.NUMBER, mean(f.STEP_DECODE_ROWS, "worker", of="workers"), "Of steps with any."
        ),
        _by_worker("Tokens", Unit.A_SECOND, rate(of_workers(f.STEP_TOKENS, phase="decode"), "worker")),
        Panel(
            "Running requests",
            Unit.NUMBER,
            (
                Query(total(of_workers(f.REQUESTS_RUNNING), "worker"), "{{worker}}"),
                Query(total(of_workers(f.BATCH_LIMIT), "worker"), "{{worker}} at most"),
            ),
            "In the running decode batch, which `--max-batch-requests` limits.",
            width=6,
        ),
        _phase("Inter-token latency", f.INTER_TOKEN_LATENCY, "As tokens leave the router."),
        _by_worker(
            "Preemptions",
            Unit.REQUESTS,
            rate(of_workers(f.PREEMPTIONS), "worker"),
            "Requests whose KV pages went to older requests.",
        ),
        _by_worker("KV cache usage", Unit.SHARE, total(of_workers(f.KV_USAGE), "worker"), "Including reserved pages."),
    ),
)

DASHBOARD = Dashboard(
    "phases",
    "Tandem: prefill, transfer, decode",
    "The time of each phase, in the order of a request",
    (_ALL_PHASES, _QUEUE, _PREFILL, _TRANSFER, _DECODE),
)
