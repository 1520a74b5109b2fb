"""Settings of the planner."""

from dataclasses import dataclass, field
from enum import StrEnum

from tandem.capacity.planner.decision import Limits, Range
from tandem.protocol.errors import InvalidArgument


class PlannerMode(StrEnum):
    """The planner's permissions: off, propose changes only, or act."""

    OFF = "off"
    DRY_RUN = "dry-run"
    """Decides, logs the decision and changes nothing."""
    ON = "on"


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Settings of the planner."""

    mode: PlannerMode = PlannerMode.OFF
    window_s: float = 15.0
    """The length of an observation window, in seconds, above 0: long enough for some tens of requests."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Validates the window; InvalidArgument names the option."""
        if not 0 < self.window_s < float("inf"):
            raise InvalidArgument("--planner-window", f"{self.window_s:g} is no number of seconds above 0")


def planner_config(
    mode: str, window_s: float, *, workers: str = "", prefill: str = "", decode: str = ""
) -> PlannerConfig:
    """Parses the planner's command-line options; ranges are MIN:MAX, "" = none. InvalidArgument names the option."""
    if mode not in list(PlannerMode):
        raise InvalidArgument("--planner", f"{mode!r} is none of {', '.join(PlannerMode)}")
    ranges = {"--planner-workers": workers, "--planner-prefill": prefill, "--planner-decode": decode}
    for option, given in ranges.items():
        if given and mode == PlannerMode.OFF:
            raise InvalidArgument(option, "means nothing while the planner is off; add --planner on, or dry-run")
    limits = Limits(
        prefill=parse_range("--planner-prefill", prefill) if prefill else Range(),
        decode=parse_range("--planner-decode", decode) if decode else Range(),
        workers=parse_range("--planner-workers", workers) if workers else None,
    )
    return PlannerConfig(PlannerMode(mode), window_s, limits)


def parse_range(option: str, text: str) -> Range:
    """Parses "MIN:MAX", both included; InvalidArgument names `option`."""
    low, colon, high = text.partition(":")
    if not (colon and low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise InvalidArgument(option, f"{text!r} is not MIN:MAX with 1 <= MIN <= MAX; 1:8 is, for example")
    return Range(int(low), int(high))
