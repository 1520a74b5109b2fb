"""The rows of the strategy table: cluster settings for a number of equal workers."""

from dataclasses import dataclass, field

from benchmarks.cluster import Settings
from tandem.protocol.errors import InvalidArgument
from tandem.settings.slo import BEST_EFFORT, Overload, SloClass

SHARED = "shared"
ADAPTIVE = "adaptive"
DISAGGREGATED = "disaggregated"
ALL, NONE = "all", "none"
"""Values of `--ask` other than the default, `ADAPTIVE`: all rows, or none, get one load per SLO cell.

The requests of such a load name the cell's SLO class.
"""
_BUDGETS = (512, 2048)
GAP_50_MS = SloClass("gap-50ms", itl_s=0.050, overload=Overload.DEGRADE)
"""A target for gaps alone, from which steps with decode rows derive the length of their chunks."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A row of the table. Of several rows of one `kind`, the table shows the best."""

    name: str
    kind: str
    settings: Settings = field(compare=False)
    slo: SloClass = field(default=BEST_EFFORT, compare=False)
    """The class that all requests of the row name, unless there is one load per SLO cell."""


def strategies(workers: int) -> tuple[Strategy, ...]:
    """Return all rows for this number of workers, one per GPU. A single worker cannot be disaggregated."""
    if workers < 1:
        raise InvalidArgument("--workers", f"{workers} is less than 1")
    colocated = {"mode": "colocated", "workers": workers}
    return (
        Strategy(SHARED, SHARED, colocated | {"step_policy": "unchunked"}),
        *(Strategy(f"chunked-{budget}", f"chunked-{budget}", colocated | _chunked(budget)) for budget in _BUDGETS),
        Strategy("priority", "priority", colocated | {"step_policy": "decode-priority"}),
        Strategy("priority-50ms", "priority-50ms", colocated | {"step_policy": "decode-priority"}, GAP_50_MS),
        *(
            Strategy(
                f"{DISAGGREGATED}-{prefill}-{workers - prefill}",
                DISAGGREGATED,
                {"mode": "disaggregated", "prefill": prefill, "decode": workers - prefill},
            )
            for prefill in range(1, workers)
        ),
        Strategy(ADAPTIVE, ADAPTIVE, {"mode": "adaptive", "workers": workers, "step_policy": "decode-priority"}),
    )


def _chunked(budget: int) -> dict[str, object]:
    return {"step_policy": "chunked", "step_budget": budget}


def chosen(every: tuple[Strategy, ...], names: str) -> tuple[Strategy, ...]:
    """Return the rows named in `names`, comma-separated.

    A kind names all its rows, and an empty text names all rows.
    """
    if not names:
        return every
    wanted = names.split(",")
    for name in wanted:
        if not any(name in {row.name, row.kind} for row in every):
            raise InvalidArgument("--only", f"{name!r} is not one of {', '.join(row.name for row in every)}")
    return tuple(row for row in every if row.name in wanted or row.kind in wanted)


def asks(row: Strategy, asked: str) -> bool:
    """Return True if this row gets one load per SLO cell; `asked` is the value of `--ask`."""
    return asked in {ALL, row.kind} and not row.slo.has_targets
