"""SLO classes: named latency targets with a policy for targets that cannot be met, and their option parser."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.settings.invalid import refuse


class Overload(StrEnum):
    """The policy for a request whose targets cannot be met on any worker."""

    REJECT = "reject"
    """The router rejects the request at once, with a retry hint."""
    DEGRADE = "degrade"
    """The request runs without targets: requests with targets are prefilled first, but all decode in one batch."""


@dataclass(frozen=True, slots=True)
class SloClass:
    """The latency targets of one SLO class, in seconds; infinity = no target."""

    name: str
    ttft_s: float = math.inf
    """The TTFT target, measured from the request's arrival."""
    itl_s: float = math.inf
    """The ITL target: the maximum of a request's inter-token gap at the percentile `itl_percent`."""
    itl_steps: float = math.inf
    """The ITL target as a multiple of an idle worker's decode step; the smaller one of this and `itl_s` applies."""
    itl_percent: float = 99.0
    """The percentile of a request's own inter-token gaps that the ITL target limits, between 0 and 100."""
    worst_gap_s: float = math.inf
    """The maximum length of every inter-token gap of a request."""
    overload: Overload = Overload.REJECT
    has_targets: bool = field(init=False, repr=False, compare=False)
    """True if the class has any target."""
    has_gap_target: bool = field(init=False, repr=False, compare=False)
    """True if the class limits inter-token gaps, by an ITL target or `worst_gap_s`."""

    def __post_init__(self) -> None:
        """Set the derived flags. Raises InvalidArgument for a missing name or a target out of range."""
        if not self.name:
            refuse("slo_classes", "has a class without a name; give it one")
        targets = (self.ttft_s, self.itl_s, self.itl_steps, self.worst_gap_s)
        if not (all(target > 0 for target in targets) and 0 < self.itl_percent < 100):
            message = f"class {self.name!r} needs targets above 0 and a percentile above 0 and below 100"
            refuse("slo_classes", message)
        object.__setattr__(self, "has_targets", min(targets) < math.inf)
        object.__setattr__(self, "has_gap_target", min(targets[1:]) < math.inf)

    def __hash__(self) -> int:
        """Hash the name only, because workers count decoding requests by class in their hot path."""
        return hash(self.name)

    def itl_target(self, idle_step_s: float) -> float:
        """Return the ITL target in seconds on a worker whose decode step of a single request takes `idle_step_s`."""
        return min(self.itl_s, self.itl_steps * idle_step_s)

    def gap_target(self, idle_step_s: float) -> float:
        """Return the maximum inter-token gap in seconds with which targets are met even if all gaps are that long.

        This is min(ITL target, `worst_gap_s`); the arguments are those of `itl_target`.
        """
        return min(self.itl_target(idle_step_s), self.worst_gap_s)


BEST_EFFORT = SloClass("best_effort", overload=Overload.DEGRADE)
"""The class without targets; its requests are never rejected for latency."""
DEFAULT_CLASSES = (
    SloClass("strict", ttft_s=2.0, itl_steps=2.0),
    SloClass("balanced", ttft_s=1.0, itl_s=0.025),
    SloClass("quick", ttft_s=0.3, itl_s=0.060),
    BEST_EFFORT,
)


def classes_by_name(classes: Iterable[SloClass]) -> dict[str, SloClass]:
    """Return the classes by name. Raises InvalidArgument if two classes have the same name."""
    named: dict[str, SloClass] = {}
    for slo_class in classes:
        if slo_class.name in named:
            refuse("slo_classes", f"has two classes named {slo_class.name!r}; name each once")
        named[slo_class.name] = slo_class
    return named


def with_defaults(own: Iterable[SloClass]) -> tuple[SloClass, ...]:
    """Return the default classes and `own`; a class of `own` replaces the default class of the same name."""
    return tuple(({slo_class.name: slo_class for slo_class in DEFAULT_CLASSES} | classes_by_name(own)).values())


def parse_class(text: str) -> SloClass:
    """Parse "NAME:TTFT_MS:ITL_MS[:PERCENT[:WORST_GAP_MS]][:reject|degrade]".

    Raises InvalidArgument, which says what is wrong.
    """
    name, *values = text.split(":")
    overload = Overload.REJECT
    if values and values[-1] in list(Overload):
        overload = Overload(values.pop())
    try:
        ttft_ms, itl_ms, percent, worst_ms = _filled(tuple(float(value) for value in values))
    except ValueError:
        form = "NAME:TTFT_MS:ITL_MS[:PERCENT[:WORST_GAP_MS]][:reject|degrade]"
        refuse("--slo-class", f"{text!r} is not {form}")
    return SloClass(
        name, ttft_ms / 1e3, itl_ms / 1e3, itl_percent=percent, worst_gap_s=worst_ms / 1e3, overload=overload
    )


def _filled(given: tuple[float, ...]) -> tuple[float, ...]:
    """Append the defaults of the omitted values. Raises ValueError for too few or too many values."""
    if not 2 <= len(given) <= 4:
        raise ValueError
    return (*given, *(99.0, math.inf)[len(given) - 2 :])


def parse_classes(_option: str, texts: Iterable[str]) -> tuple[SloClass, ...]:
    """Return the default classes and the parsed classes of `texts`. Raises InvalidArgument as `parse_class` does."""
    return with_defaults(parse_class(text) for text in texts)
