"""How a load's engine steps went: how long they were, and how far from what the workers predicted."""

from telemetry import families as f
from telemetry.family import Family
from telemetry.scrape import Stretch

_PHASES = ("decode", "mixed", "prefill")
_PARTS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def steps_of(load: Stretch) -> dict[str, dict[str, object]]:
    """Of all workers between two scrapes, ready for JSON: by what was in a step, how many there were, and quantiles of
    their milliseconds and of what they took ÷ what was predicted, both as exact as the histograms' buckets.
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


def _rounded(load: Stretch, times: float, family: Family, part: float, phase: str) -> float | None:
    value = load.quantile(family, part, phase=phase)
    return None if value is None else round(value * times, 3)
