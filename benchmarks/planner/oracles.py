"""Compares the planner with two oracles that know the day: the best split of each hour, and the best constant one."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from tandem.capacity.planner.decision import Direction

UNDONE_PART = 0.1
"""Share of the role changes that may be undone within the same hour; small corrections are not flapping."""
AGREED_OF_BEST, AGREED_OVER_SINGLE = 0.95, 1.2


def undone(changes: Sequence[dict[str, Any]], hour_s: float) -> int:
    """Returns the number of role changes that others of the same hour undo."""
    by_hour: dict[int, Counter[str]] = defaultdict(Counter)
    for change in changes:
        by_hour[int(change["at_s"] / hour_s)][change["direction"]] += change["flips"]
    return sum(min(flips[Direction.TO_PREFILL], flips[Direction.TO_DECODE]) for flips in by_hour.values())


def judged(
    planned: dict[str, Any], by_split: dict[str, dict[str, float]], names: list[str], hour_s: float
) -> dict[str, Any]:
    """Compares the planner's goodput with the oracles'.

    `by_split` has the goodput of each split in each kind of hour, `names` the kind of each hour of `hour_s` seconds.
    """
    best = {name: max(by_split, key=lambda split, name=name: by_split[split][name]) for name in set(names)}  # type: ignore[misc]
    each_hour = sum(by_split[best[name]][name] for name in names)
    single = max(by_split, key=lambda split: sum(by_split[split][name] for name in names))
    alone = sum(by_split[single][name] for name in names)
    ours, changes = sum(planned["goodput_per_s"]), planned["changes"]
    flips, back = sum(change["flips"] for change in changes), undone(changes, hour_s)
    agreed = ours >= AGREED_OF_BEST * each_hour and ours >= AGREED_OVER_SINGLE * alone
    return {
        "best_splits": best,
        "single_split": single,
        "of_the_best_of_each_hour": round(ours / each_hour, 4),
        "over_the_best_single": round(ours / alone, 4),
        "flips": flips,
        "undone_flips": back,
        "kept": agreed and back <= UNDONE_PART * flips,
    }
