"""Service classes as options give them: by name, and as texts of the command line."""

import math
from collections.abc import Iterable

from router.slo import DEFAULT_CLASSES, Overload, SloClass
from tandem.protocol.errors import InvalidArgument


def classes_by_name(classes: Iterable[SloClass]) -> dict[str, SloClass]:
    """Return the classes by name; raises InvalidArgument if two have the same name."""
    named: dict[str, SloClass] = {}
    for each in classes:
        if each.name in named:
            raise InvalidArgument("slo_classes", f"has two classes named {each.name!r}; name each once")
        named[each.name] = each
    return named


def with_defaults(own: Iterable[SloClass]) -> tuple[SloClass, ...]:
    """Return the default classes and these; one of these replaces the default class of its name."""
    return tuple(({each.name: each for each in DEFAULT_CLASSES} | classes_by_name(own)).values())


def parse_class(text: str) -> SloClass:
    """Parse "NAME:TTFT_MS:ITL_MS[:PERCENT[:WORST_GAP_MS]][:reject|degrade]"; InvalidArgument says what is wrong."""
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
    """Add the defaults of the values that were not given; ValueError for too few or too many."""
    if not 2 <= len(given) <= 4:
        raise ValueError
    return (*given, *(99.0, math.inf)[len(given) - 2 :])
