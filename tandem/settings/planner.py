"""Settings of the planner, which adapts the roles and the number of workers to the load.

The planner decides once per observation window, and changes the cluster only if several consecutive windows agree.
"""

import dataclasses
from dataclasses import dataclass, fields
from enum import StrEnum

from tandem.settings.invalid import refuse
from tandem.settings.setting import NameOf, Settings, Topic, field_name, setting


class PlannerMode(StrEnum):
    """The actions that the planner may take: none, logging its decisions, or changing the cluster."""

    OFF = "off"
    DRY_RUN = "dry-run"
    """The planner decides and logs its decisions, but changes nothing."""
    ON = "on"


@dataclass(frozen=True, slots=True)
class Range:
    """A range of worker counts, both ends included."""

    least: int = 1
    most: int = 1 << 16

    def __post_init__(self) -> None:
        """Validate the range. Raises InvalidArgument if it is empty."""
        if not 1 <= self.least <= self.most:
            refuse("--planner limits", f"{self.least}:{self.most} is no range of 1 or more workers")

    def clip(self, number: int) -> int:
        """Return `number`, limited to the range."""
        return min(max(number, self.least), self.most)


def parse_range(option: str, text: str) -> Range:
    """Parse "MIN:MAX", both ends included. Raises InvalidArgument, which names `option`, for other texts."""
    low, colon, high = text.partition(":")
    if not (colon and low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        refuse(option, f"{text!r} is not MIN:MAX with 1 <= MIN <= MAX; 1:8 is, for example")
    return Range(int(low), int(high))


@dataclass(frozen=True, slots=True)
class Limits(Settings):
    """The limits of the planner's changes. A window is one observation period of `window_s` seconds."""

    prefill: Range = setting(
        Range(),
        help="MIN:MAX of them that prefill when disaggregated.",
        topic=Topic.PLANNER,
        option="planner-prefill",
        kind=str,
        parse=parse_range,
    )
    decode: Range = setting(
        Range(),
        help="MIN:MAX of them that decode when disaggregated.",
        topic=Topic.PLANNER,
        option="planner-decode",
        kind=str,
        parse=parse_range,
    )
    workers: Range | None = setting(
        None,
        help="MIN:MAX workers the planner may keep; default: as many as there are.",
        topic=Topic.PLANNER,
        option="planner-workers",
        kind=str,
        parse=parse_range,
    )
    """The range of the total number of workers; None = the number does not change, and workers only change roles."""
    required_windows: int = 2
    """Number of consecutive windows that must lead to the same decision before the planner makes a change."""
    required_windows_down: int = 6
    """Like `required_windows`, for a removal of workers."""
    required_windows_back: int = 4
    """Like `required_windows`, for reverting a change that is less than `settled` windows old.

    If another number of required windows is larger, that number applies.
    """
    cooldown: int = 2
    """Number of windows after a change in which the planner makes no further change."""
    settled: int = 6
    """Number of windows after a change of the workers or the load before the policy learns from missed targets."""


@dataclass(frozen=True, slots=True)
class PlannerSettings(Settings):
    """The planner's actions, its observation window and its limits."""

    actions: PlannerMode = setting(
        PlannerMode.OFF,
        help="on: roles follow the load, and with --planner-workers the number of workers; dry-run: it only says what"
        " it would do; off.",
        topic=Topic.PLANNER,
        option="planner",
        choices=PlannerMode,
    )
    window_s: float = setting(
        15.0,
        help="Seconds of the planner's observation window.",
        topic=Topic.PLANNER,
        option="planner-window",
        above=0,
    )
    """A window should be long enough to contain some tens of requests."""
    limits: Limits = dataclasses.field(default_factory=Limits)

    def check(self, name_of: NameOf = field_name) -> None:
        """Check the settings; see `Settings.check`."""
        Settings.check(self, name_of)
        for field in fields(self.limits):
            if self.actions is PlannerMode.OFF and getattr(self.limits, field.name) != field.default:
                refuse(name_of(field), "means nothing while the planner is off; add --planner on, or dry-run")
