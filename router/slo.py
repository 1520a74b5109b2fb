"""Service classes: what a request may expect of its latencies, and what happens when that cannot be held."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from wire.errors import InvalidArgument


class Overload(StrEnum):
    """What becomes of a request whose targets cannot be held, wherever it went."""

    REJECT = "reject"
    """It is turned away at once, with a hint when to come back."""
    DEGRADE = "degrade"
    """It is served without targets: its prompt behind all that have some, its answer beside theirs."""


@dataclass(frozen=True, slots=True)
class SloClass:
    """Targets in seconds; infinite = none."""

    name: str
    ttft_s: float = math.inf
    """Of the first token, from the request's arrival."""
    itl_s: float = math.inf
    """Of the time between tokens, at `itl_percent`."""
    itl_steps: float = math.inf
    """The same in decode steps of an idle worker; the smaller of the two counts."""
    itl_percent: float = 99.0
    """The percentile of its own gaps that a request is judged by."""
    worst_gap_s: float = math.inf
    """Of every gap."""
    overload: Overload = Overload.REJECT
    has_targets: bool = field(init=False, repr=False, compare=False)
    """Whether anything is promised."""
    has_gap_target: bool = field(init=False, repr=False, compare=False)
    """Whether anything is promised between tokens."""

    def __post_init__(self) -> None:
        """InvalidArgument says what is wrong."""
        if not self.name:
            raise InvalidArgument("slo_classes", "has a class without a name; give it one")
        targets = (self.ttft_s, self.itl_s, self.itl_steps, self.worst_gap_s)
        if not (all(target > 0 for target in targets) and 0 < self.itl_percent < 100):
            message = f"class {self.name!r} needs targets above 0 and a percentile above 0 and below 100"
            raise InvalidArgument("slo_classes", message)
        object.__setattr__(self, "has_targets", min(targets) < math.inf)
        object.__setattr__(self, "has_gap_target", min(targets[1:]) < math.inf)

    def __hash__(self) -> int:
        """By name: workers count their answers by class."""
        return hash(self.name)

    def gap_target(self, idle_step_s: float) -> float:
        """The target between tokens where a decode step of one request takes `idle_step_s`, in seconds."""
        return min(self.itl_s, self.itl_steps * idle_step_s)

    def tolerates(self, idle_step_s: float) -> float:
        """The longest gap there that breaks no promise, however many there are, in seconds."""
        return min(self.itl_s, self.itl_steps * idle_step_s, self.worst_gap_s)

    def spare_gaps(self, tokens: float) -> int:
        """How many gaps of an answer of so many tokens may be longer than its target."""
        return int(self.gaps_allowed * max(0.0, tokens - 1) + 1e-6)

    @property
    def gaps_allowed(self) -> float:
        """Part of a request's gaps that may be over the target."""
        return 1 - self.itl_percent / 100


BEST_EFFORT = SloClass("best_effort", overload=Overload.DEGRADE)
"""Nothing is promised and nothing refused for being late."""
DEFAULT_CLASSES = (
    SloClass("strict", ttft_s=2.0, itl_steps=2.0),
    SloClass("balanced", ttft_s=1.0, itl_s=0.025),
    SloClass("quick", ttft_s=0.3, itl_s=0.060),
    BEST_EFFORT,
)


def classes_by_name(classes: Iterable[SloClass]) -> dict[str, SloClass]:
    """InvalidArgument if two have the same name."""
    named: dict[str, SloClass] = {}
    for each in classes:
        if each.name in named:
            raise InvalidArgument("slo_classes", f"has two classes named {each.name!r}; name each once")
        named[each.name] = each
    return named


def with_defaults(own: Iterable[SloClass]) -> tuple[SloClass, ...]:
    """The default classes and these, which take the place of a default one of their name."""
    return tuple(({each.name: each for each in DEFAULT_CLASSES} | classes_by_name(own)).values())


def parse_class(text: str) -> SloClass:
    """From "NAME:TTFT_MS:ITL_MS[:PERCENT[:WORST_GAP_MS]][:reject|degrade]"; InvalidArgument says what is wrong."""
    name, *values = text.split(":")
    overload = Overload.REJECT
    if values and values[-1] in list(Overload):
        overload = Overload(values.pop())
    try:
        ttft_ms, itl_ms, percent, worst_ms = _filled(tuple(float(each) for each in values))
    except ValueError:
        form = "NAME:TTFT_MS:ITL_MS[:PERCENT[:WORST_GAP_MS]][:reject|degrade]"
        raise InvalidArgument("--slo-class", f"{text!r} is not {form}") from None
    return SloClass(
        name, ttft_ms / 1e3, itl_ms / 1e3, itl_percent=percent, worst_gap_s=worst_ms / 1e3, overload=overload
    )


def _filled(given: tuple[float, ...]) -> tuple[float, ...]:
    """What was not given is the field's default; ValueError for too few or too many."""
    if not 2 <= len(given) <= 4:
        raise ValueError
    return (*given, *(99.0, math.inf)[len(given) - 2 :])
