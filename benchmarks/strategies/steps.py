"""Statistics of a load's engine steps: durations, and durations / predictions."""

from tandem.metrics import families as f
from tandem.metrics.family import Family
from tandem.metrics.scrape import ScrapeInterval

_PHASES = ("decode", "mixed", "prefill")
_PARTS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def steps_of(load: ScrapeInterval) -> dict[str, dict[str, object]]:
    """Returns statistics of all workers' steps between two scrapes, by kind of step.

    They are the number of steps, and quantiles of milliseconds and of observed / predicted time, as exact as the
    histograms' buckets.
    """
    found: dict[str, dict[str, object]] = {}
    for phase in _PHASES:
        count = load.grown(f.STEP_SECONDS, "_count", phase=phase)
        if count:
            found[phase] = {
                "count": int(count),
                "ms": {name: _rounded(load, 1e3, f.STEP_SECONDS, part, phase) for name, part in _PARTS.items()},
                "over_predicted": {
                    name: _rounded(load, 1.0, f.STEP_OVER_PREDICTED, part, phase) for name, part in _PARTS.items()
                },
            }
    return found


def _rounded(load: ScrapeInterval, times: float, family: Family, part: float, phase: str) -> float | None:
    value = load.quantile(family, part, phase=phase)
    return None if value is None else round(value * times, 3)
