"""The dashboard of serving: SLO attainment, latencies, traffic and placement."""

from deploy.dashboards.grafana import Dashboard, Kind, Panel, Query, Row, Unit
from deploy.dashboards.promql import quantile, rate, series, share, total
from tandem.metrics import families as f
from tandem.metrics.family import Family

_REQUESTS, _MET = series(f.SLO_REQUESTS), series(f.SLO_REQUESTS, outcome="met")
_QUANTILES = (0.5, 0.9, 0.99)


def _latency(title: str, family: Family, about: str) -> Panel:
    buckets = series(family, "_bucket")
    curves = tuple(Query(quantile(part, buckets), f"p{part * 100:g}") for part in _QUANTILES)
    return Panel(title, Unit.SECONDS, curves, about, width=6)


def _heatmap(title: str, family: Family) -> Panel:
    cells = (Query(rate(series(family, "_bucket"), "le")),)
    return Panel(title, Unit.SECONDS, cells, "Observations a second in each bucket.", Kind.HEATMAP, width=12)


_SERVICE_CLASSES = Row(
    "Service classes",
    (
        Panel("Goodput", Unit.REQUESTS, (Query(rate(_MET)),), "Requests that met their class.", Kind.NUMBER, width=4),
        Panel(
            "SLO attainment",
            Unit.SHARE,
            (Query(share(rate(_MET), rate(_REQUESTS))),),
            "Share of all requests that met their class; rejected requests count as missed.",
            Kind.NUMBER,
            width=4,
        ),
        Panel(
            "Goodput by class",
            Unit.REQUESTS,
            (
                Query(rate(_MET, "slo_class"), "{{slo_class}}"),
                Query(total(series(f.GOODPUT), "slo_class"), "{{slo_class}}, by the router"),
            ),
            "Rate of requests that met their class; the router's own value covers the last minute.",
        ),
        Panel(
            "Error budget burn rate",
            Unit.NUMBER,
            (
                Query('tandem:slo_burn:rate5m{namespace=~"$namespace",model=~"$model"}', "{{slo_class}}, 5 min"),
                Query('tandem:slo_burn:rate1h{namespace=~"$namespace",model=~"$model"}', "{{slo_class}}, 1 h"),
            ),
            "Rate of missed requests / the rate that the objective allows; 1 uses up the budget exactly. Recorded by "
            "deploy/prometheus/rules.yaml.",
        ),
        Panel(
            "Outcomes",
            Unit.REQUESTS,
            (Query(rate(_REQUESTS, "outcome"), "{{outcome}}"),),
            "Requests by outcome: targets met, missed, rejected at admission, or failed.",
            width=12,
            stacked=True,
        ),
        Panel(
            "Missed targets by phase",
            Unit.REQUESTS,
            (Query(rate(series(f.SLO_MISSED), "phase"), "{{phase}}"),),
            "The phase in which requests missed their class; the next dashboard shows the phases.",
            width=12,
            stacked=True,
        ),
    ),
)

_LATENCIES = Row(
    "Latency at the router",
    (
        _latency("Time to first token", f.TIME_TO_FIRST_TOKEN, "From arrival until the first token leaves."),
        _latency("Inter-token latency", f.INTER_TOKEN_LATENCY, "Tokens that leave together count as 0."),
        _latency("Time per output token", f.TIME_PER_OUTPUT_TOKEN, "Of finished requests."),
        _latency("End-to-end latency", f.E2E_REQUEST_LATENCY, "From arrival to the end."),
        _heatmap("Time to first token, distribution", f.TIME_TO_FIRST_TOKEN),
        _heatmap("Inter-token latency, distribution", f.INTER_TOKEN_LATENCY),
    ),
)

_TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Requests in the cluster",
            Unit.NUMBER,
            (
                Query(total(series(f.REQUESTS_RUNNING, role="router")), "on workers"),
                Query(total(series(f.REQUESTS_WAITING, role="router")), "in the queue"),
            ),
            stacked=True,
        ),
        Panel(
            "Tokens",
            Unit.A_SECOND,
            (
                Query(rate(series(f.GENERATION_TOKENS)), "generated"),
                Query(rate(series(f.PROMPT_TOKENS)), "of prompts"),
                Query(rate(series(f.CACHED_PROMPT_TOKENS)), "of them cached"),
            ),
            "Prompt tokens count when their answers end.",
        ),
        Panel(
            "Completed answers",
            Unit.REQUESTS,
            (Query(rate(series(f.REQUEST_SUCCESS), "finished_reason"), "{{finished_reason}}"),),
            "How answers ended; abort: the client left.",
            stacked=True,
        ),
        Panel(
            "Rejected requests",
            Unit.REQUESTS,
            (Query(rate(series(f.ADMISSION_REJECTIONS), "reason"), "{{reason}}"),),
            "By reason. `slo_ttft`, `slo_itl`: the target of the class could not have been met.",
        ),
        Panel(
            "Failed requests",
            Unit.REQUESTS,
            (Query(rate(series(f.REQUEST_FAILURES), "code"), "{{code}}"),),
            "Admitted requests that ended with an error.",
        ),
        Panel(
            "Retried attempts",
            Unit.REQUESTS,
            (
                Query(rate(series(f.REQUEST_RETRIES)), "retries"),
                Query(rate(series(f.STALE_EVENTS)), "late messages dropped"),
            ),
            "Failures that clients do not see, but that cost time, and messages about attempts that were over.",
        ),
        Panel(
            "Degraded",
            Unit.NUMBER,
            (Query(total(series(f.DEGRADED)), "routers"),),
            "Routers whose requests wait for the replacement of the only worker of a role.",
        ),
    ),
)

_PLACEMENT = Row(
    "Placement",
    (
        Panel(
            "Predicted / observed",
            Unit.NUMBER,
            (Query(share(rate(series(f.PREDICTED), "quantity"), rate(series(f.ACTUAL), "quantity")), "{{quantity}}"),),
            "Above 1, predictions are too pessimistic; below 1, too optimistic.",
        ),
        Panel(
            "Prediction error",
            Unit.SHARE,
            (Query(quantile(0.5, series(f.PREDICTION_ERROR, "_bucket"), "quantity"), "{{quantity}}, median"),),
        ),
        Panel(
            "Placement regret",
            Unit.SECONDS,
            (Query(share(rate(series(f.REGRET)), rate(series(f.PLACEMENTS))), "a placement"),),
            "Mean seconds by which placements turned out worse than the predicted cost of the second choice.",
        ),
        Panel(
            "Prompt tokens by source",
            Unit.A_SECOND,
            (Query(rate(series(f.PLACED_TOKENS), "source"), "{{source}}"),),
            "Resident tokens were in the pool, reloaded ones came from a tier or from another worker.",
        ),
        Panel(
            "Gap between turns",
            Unit.SECONDS,
            tuple(Query(quantile(part, series(f.TURN_GAP, "_bucket")), f"p{part * 100:g}") for part in (0.5, 0.9)),
            "Time between the arrival of a prompt and that of its next turn; cached prompts are kept accordingly.",
        ),
    ),
)

_ACCESS = Row(
    "Access",
    (
        Panel(
            "Audit log",
            Unit.A_SECOND,
            (
                Query(rate(series(f.AUDIT_RECORDS)), "written"),
                Query(rate(series(f.AUDIT_RECORDS_LOST)), "lost"),
            ),
            "Calls of clients. Lost ones are missing in the log, because its disk was full or too slow.",
        ),
        Panel(
            "Certificate",
            Unit.SECONDS,
            (Query(f"{total(series(f.TLS_CERTIFICATE_EXPIRES), 'worker')} - time()", "{{worker}}"),),
            "Time until the certificate of the ports for clients ends.",
        ),
    ),
    folded=True,
)

DASHBOARD = Dashboard(
    "serving",
    "Tandem: serving and goodput",
    "SLO attainment and the phase that caused misses",
    (_SERVICE_CLASSES, _LATENCIES, _TRAFFIC, _PLACEMENT, _ACCESS),
)
