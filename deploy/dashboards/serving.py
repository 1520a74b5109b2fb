"""Is it meeting its promises?"""

from deploy.dashboards.grafana import Dashboard, Kind, Panel, Query, Row, Unit
from deploy.dashboards.promql import quantile, rate, series, share, total
from telemetry import families as f
from telemetry.family import Family

_REQUESTS, _MET = series(f.SLO_REQUESTS), series(f.SLO_REQUESTS, outcome="met")
_QUANTILES = (0.5, 0.9, 0.99)


def _latency(title: str, family: Family, about: str) -> Panel:
    buckets = series(family, "_bucket")
    curves = tuple(Query(quantile(part, buckets), f"p{part * 100:g}") for part in _QUANTILES)
    return Panel(title, Unit.SECONDS, curves, about, width=6)


_FRONT = "worker", "front"


def _by_front(title: str, unit: Unit, curves: str, about: str = "") -> Panel:
    """A curve for each front process."""
    return Panel(title, unit, (Query(curves, "{{worker}} front-{{front}}"),), about, width=6)


def _heatmap(title: str, family: Family) -> Panel:
    cells = (Query(rate(series(family, "_bucket"), "le")),)
    return Panel(title, Unit.SECONDS, cells, "Observations a second in each bucket.", Kind.HEATMAP, width=12)


_PROMISES = Row(
    "Promises",
    (
        Panel("Goodput", Unit.REQUESTS, (Query(rate(_MET)),), "Requests that met their class.", Kind.NUMBER, width=4),
        Panel(
            "Kept",
            Unit.SHARE,
            (Query(share(rate(_MET), rate(_REQUESTS))),),
            "Part of all requests that met their class; those turned away count as missed.",
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
            "The rate of requests that met what their class promises; the router's own looks back a minute.",
        ),
        Panel(
            "Budget burnt",
            Unit.NUMBER,
            (
                Query('tandem:slo_burn:rate5m{namespace=~"$namespace",model=~"$model"}', "{{slo_class}}, 5 min"),
                Query('tandem:slo_burn:rate1h{namespace=~"$namespace",model=~"$model"}', "{{slo_class}}, 1 h"),
            ),
            "How many times faster than allowed promises are broken; 1 uses the budget up just in time. Recorded by "
            "deploy/prometheus/rules.yaml.",
        ),
        Panel(
            "Outcomes",
            Unit.REQUESTS,
            (Query(rate(_REQUESTS, "outcome"), "{{outcome}}"),),
            "What became of requests.",
            width=12,
            stacked=True,
        ),
        Panel(
            "What was to blame",
            Unit.REQUESTS,
            (Query(rate(series(f.SLO_MISSED), "phase"), "{{phase}}"),),
            "The phase in which requests lost what their class promises; the next dashboard shows the phases.",
            width=12,
            stacked=True,
        ),
    ),
)

_LATENCIES = Row(
    "Latency at the router's door",
    (
        _latency("Time to first token", f.TIME_TO_FIRST_TOKEN, "From arrival to the first token leaving."),
        _latency("Time between tokens", f.INTER_TOKEN_LATENCY, "Tokens that leave together count as 0."),
        _latency("Mean gap of each request", f.TIME_PER_OUTPUT_TOKEN, "Of finished requests."),
        _latency("Whole answers", f.E2E_REQUEST_LATENCY, "From arrival to the end."),
        _heatmap("Time to first token, all of it", f.TIME_TO_FIRST_TOKEN),
        _heatmap("Time between tokens, all of it", f.INTER_TOKEN_LATENCY),
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
            "Prompts count when their answers end.",
        ),
        Panel(
            "Answers",
            Unit.REQUESTS,
            (Query(rate(series(f.REQUEST_SUCCESS), "finished_reason"), "{{finished_reason}}"),),
            "How answers ended; abort: the client left.",
            stacked=True,
        ),
        Panel(
            "Turned away",
            Unit.REQUESTS,
            (Query(rate(series(f.ADMISSION_REJECTIONS), "reason"), "{{reason}}"),),
            "At the door, by reason. `slo_ttft`, `slo_itl`: the class's promise of that time could not be held.",
        ),
        Panel(
            "Failed",
            Unit.REQUESTS,
            (Query(rate(series(f.REQUEST_FAILURES), "code"), "{{code}}"),),
            "Admitted and ended with an error that the client saw.",
        ),
        Panel(
            "Attempts that another followed",
            Unit.REQUESTS,
            (Query(rate(series(f.REQUEST_RETRIES)), "retries"),),
            "Failures that no client saw, but that cost time.",
        ),
    ),
)

_PLACEMENT = Row(
    "Placement",
    (
        Panel(
            "Predicted by actual",
            Unit.NUMBER,
            (Query(share(rate(series(f.PREDICTED), "quantity"), rate(series(f.ACTUAL), "quantity")), "{{quantity}}"),),
            "Above 1, predictions are too pessimistic.",
        ),
        Panel(
            "Error of single predictions",
            Unit.SHARE,
            (Query(quantile(0.5, series(f.PREDICTION_ERROR, "_bucket"), "quantity"), "{{quantity}}, median"),),
        ),
        Panel(
            "Mean regret",
            Unit.SECONDS,
            (Query(share(rate(series(f.REGRET)), rate(series(f.PLACEMENTS))), "a placement"),),
            "By how much choices turned out worse than the next best was predicted to be.",
        ),
    ),
)

_FRONTS = Row(
    "Front processes",
    (
        _by_front(
            "Clients' connections",
            Unit.NUMBER,
            total(series(f.FRONT_CONNECTIONS), *_FRONT),
            "The kernel spreads new ones evenly; each stays where it is.",
        ),
        _by_front(
            "Messages",
            Unit.A_SECOND,
            rate(series(f.FRONT_MESSAGES), *_FRONT),
            "Parts of requests and answers, to and from the router.",
        ),
        _by_front("Bytes", Unit.BYTES_A_SECOND, rate(series(f.FRONT_BYTES), *_FRONT)),
        _by_front(
            "Restarts",
            Unit.NUMBER,
            total(series(f.FRONT_RESTARTS), *_FRONT),
            "Each costs the clients of that process their connections; the router's log has the reason.",
        ),
    ),
    folded=True,
)

DASHBOARD = Dashboard(
    "serving",
    "Tandem: serving and goodput",
    "Is it meeting its promises, and if not, which phase is to blame?",
    (_PROMISES, _LATENCIES, _TRAFFIC, _PLACEMENT, _FRONTS),
)
