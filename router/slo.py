"""Service classes: latency targets of requests, and the rule for requests whose targets cannot be kept."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from wire.errors import InvalidArgument


class Overload(StrEnum):
    """The treatment of a request whose targets no worker could keep."""

    REJECT = "reject"
    """The request is rejected at once, with a retry hint."""
    DEGRADE = "degrade"
    """The request is served without targets: its prompt after all that have some, its answer in the same batches."""


@dataclass(frozen=True, slots=True)
class SloClass:
    """Latency targets in seconds; infinite = none."""

    name: str
    ttft_s: float = math.inf
    """The target of the time from arrival to the first token."""
    itl_s: float = math.inf
    """The target of the time between tokens, at `itl_percent`."""
    itl_steps: float = math.inf
    """The same in decode steps of an idle worker; the smaller of the two counts."""
    itl_percent: float = 99.0
    """The percentile of its own gaps that a request is judged by."""
    worst_gap_s: float = math.inf
    """The target of every single gap."""
    overload: Overload = Overload.REJECT
    has_targets: bool = field(init=False, repr=False, compare=False)
    """True if the class has any target."""
    has_gap_target: bool = field(init=False, repr=False, compare=False)
    """True if the class has a target between tokens."""

    def __post_init__(self) -> None:
        """Raise InvalidArgument for targets that are not positive."""
        if not self.name:
            raise InvalidArgument("slo_classes", "has a class without a name; give it one")
        targets = (self.ttft_s, self.itl_s, self.itl_steps, self.worst_gap_s)
        if not (all(target > 0 for target in targets) and 0 < self.itl_percent < 100):
            message = f"class {self.name!r} needs targets above 0 and a percentile above 0 and below 100"
            raise InvalidArgument("slo_classes", message)
        object.__setattr__(self, "has_targets", min(targets) < math.inf)
        object.__setattr__(self, "has_gap_target", min(targets[1:]) < math.inf)

    def __hash__(self) -> int:
        """Hash by name: workers count their answers by class."""
        return hash(self.name)

    def gap_target(self, idle_step_s: float) -> float:
        """Return the target between tokens where a decode step of one request takes `idle_step_s`, in seconds."""
        return min(self.itl_s, self.itl_steps * idle_step_s)

    def tolerates(self, idle_step_s: float) -> float:
        """Return the longest gap there that breaks no target, however often it occurs, in seconds."""
        return min(self.itl_s, self.itl_steps * idle_step_s, self.worst_gap_s)

    def spare_gaps(self, tokens: float) -> int:
        """Return the number of gaps of an answer of `tokens` that may exceed the target."""
        return int(self.gaps_allowed * max(0.0, tokens - 1) + 1e-6)

    @property
    def gaps_allowed(self) -> float:
        """The share of a request's gaps that may exceed the target."""
        return 1 - self.itl_percent / 100


BEST_EFFORT = SloClass("best_effort", overload=Overload.DEGRADE)
"""The class without targets, whose requests are never rejected for being late."""
DEFAULT_CLASSES = (
    SloClass("strict", ttft_s=2.0, itl_steps=2.0),
    SloClass("balanced", ttft_s=1.0, itl_s=0.025),
    SloClass("quick", ttft_s=0.3, itl_s=0.060),
    BEST_EFFORT,
)


def classes_by_name(classes: Iterable[SloClass]) -> dict[str, SloClass]:
    """Return the classes by name; InvalidArgument if two have the same one."""
    named: dict[str, SloClass] = {}
    for each in classes:
        if each.name in named:
            raise InvalidArgument("slo_classes", f"has two classes named {each.name!r}; name each once")
        named[each.name] = each
    return named
