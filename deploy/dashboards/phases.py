"""Which phase takes the time? Prefill, transfer and decode in the order of a request."""

from deploy.dashboards.grafana import Dashboard, Panel, Query, Row, Unit
from deploy.dashboards.promql import Selection, mean, of_workers, quantile, rate, series, share, total
from telemetry import families as f
from telemetry.family import Family

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

_WAY = Row(
    "The whole way",
    (
        Panel(
            "Mean time in each phase",
            Unit.SECONDS,
            tuple(Query(share(rate(series(family, "_sum")), _ENDED), name) for name, family in _PHASES.items()),
            "Of whole answers; together they are their latency. Stall: workers fell silent, until others took over.",
            width=12,
            stacked=True,
        ),
        Panel(
            "Promises broken by phase",
            Unit.REQUESTS,
            (Query(rate(series(f.SLO_MISSED), "phase"), "{{phase}}"),),
            "What was to blame for each request that missed its class.",
            width=12,
            stacked=True,
        ),
    ),
)

_QUEUE = Row(
    "1. Front door and queue",
    (
        _phase("Time in queues", f.QUEUE_TIME, "At the router until placement, and in the prefill worker's line."),
        Panel(
            "Waiting",
            Unit.NUMBER,
            (
                Query(total(series(f.REQUESTS_WAITING, role="router")), "router"),
                Query(total(of_workers(f.REQUESTS_WAITING), "worker"), "{{worker}}"),
            ),
            "In the router's queue, and prompts that are not wholly computed.",
            width=6,
        ),
        Panel(
            "Turned away",
            Unit.REQUESTS,
            (Query(rate(series(f.ADMISSION_REJECTIONS), "reason"), "{{reason}}"),),
            width=6,
        ),
        Panel(
            "Found in prefix caches",
            Unit.SHARE,
            (
                Query(
                    share(rate(of_workers(f.PREFIX_HITS), "worker"), rate(of_workers(f.PREFIX_QUERIES), "worker")),
                    "{{worker}}",
                ),
            ),
            "Part of the prompt tokens that were looked up.",
            width=6,
        ),
    ),
)

_PREFILL = Row(
    "2. Prefill",
    (
        _phase("Prompts", f.PREFILL_TIME, "From a prompt's first chunk to its last one's end."),
        _spread(
            "Steps with prompts in them",
            of_workers(f.STEP_SECONDS, "_bucket", phase="prefill|mixed"),
            "Mixed steps hold back the answers in them for as long.",
        ),
        _by_worker(
            "Prompt tokens computed",
            Unit.A_SECOND,
            rate(of_workers(f.STEP_TOKENS, half="prefill"), "worker"),
        ),
        _by_worker(
            "Prompt tokens in a step",
            Unit.NUMBER,
            mean(f.STEP_PREFILL_TOKENS, "worker", of="workers"),
            "Mean, of steps with any. Small ones under load mean that weights are read for few tokens.",
        ),
    ),
)

_TRANSFER = Row(
    "3. Transfer",
    (
        _phase("What hand-overs cost", f.TRANSFER_TIME, "From a prompt's end to the decode worker's first step."),
        _spread("Hand-overs", of_workers(f.TRANSFER_SECONDS, "_bucket"), "All writes of a prompt together."),
        _by_worker(
            "Hand-overs that write",
            Unit.NUMBER,
            rate(of_workers(f.TRANSFER_WRITING), "worker"),
            "At once, on average, also of those that do not end; the wire binds where they leave no pages or no work.",
        ),
        _by_worker("KV handed over", Unit.BYTES_A_SECOND, rate(of_workers(f.TRANSFER_BYTES), "worker")),
        _spread(
            "Bandwidth of single hand-overs",
            of_workers(f.TRANSFER_BANDWIDTH, "_bucket"),
            "Their bytes by the time of their writes.",
            Unit.BYTES_A_SECOND,
        ),
        Panel(
            "Leases",
            Unit.NUMBER,
            (Query(total(of_workers(f.OPEN_LEASES), "worker"), "{{worker}}"),),
            "Open ones, quarantined ones included: prompts on their way.",
            width=6,
        ),
        Panel(
            "What went wrong",
            Unit.A_SECOND,
            (
                Query(rate(of_workers(f.TRANSFER_FAILURES)), "failed"),
                Query(rate(of_workers(f.CHECKSUM_FAILURES)), "changed on the way"),
                Query(rate(of_workers(f.EXPIRED_LEASES)), "leases expired"),
                Query(rate(of_workers(f.FENCED)), "came too late"),
            ),
            "None of it reaches a client: the prompt is computed again.",
            width=12,
        ),
        Panel(
            "Wires that should be faster",
            Unit.NUMBER,
            (Query(total(of_workers(f.TRANSPORT_WARNINGS), "worker"), "{{worker}}"),),
            "TCP where there is something better, for one; `tandem status` says what to do.",
            width=12,
        ),
    ),
)

_DECODE = Row(
    "4. Decode",
    (
        _phase("Answers", f.DECODE_TIME, "From the decode worker's first step to the end."),
        _spread("Decode steps", of_workers(f.STEP_SECONDS, "_bucket", phase="decode"), "Steps without prompts."),
        _by_worker(
            "Requests in a step", Unit.NUMBER, mean(f.STEP_DECODE_ROWS, "worker", of="workers"), "Of steps with any."
        ),
        _by_worker("Tokens", Unit.A_SECOND, rate(of_workers(f.STEP_TOKENS, half="decode"), "worker")),
        Panel(
            "Running",
            Unit.NUMBER,
            (
                Query(total(of_workers(f.REQUESTS_RUNNING), "worker"), "{{worker}}"),
                Query(total(of_workers(f.BATCH_LIMIT), "worker"), "{{worker}} at most"),
            ),
            "In the running decode batch, which `--max-batch-requests` limits.",
            width=6,
        ),
        _phase("Time between tokens", f.INTER_TOKEN_LATENCY, "As tokens leave the router."),
        _by_worker(
            "Preempted",
            Unit.REQUESTS,
            rate(of_workers(f.PREEMPTIONS), "worker"),
            "Requests that gave their KV pages to older ones.",
        ),
        _by_worker("KV pages in use", Unit.SHARE, total(of_workers(f.KV_USAGE), "worker"), "Or promised."),
    ),
)

DASHBOARD = Dashboard(
    "phases",
    "Tandem: prefill, transfer, decode",
    "Which phase takes the time? In the order of a request.",
    (_WAY, _QUEUE, _PREFILL, _TRANSFER, _DECODE),
)
