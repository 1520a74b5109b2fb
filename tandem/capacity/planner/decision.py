"""The planner's limits, its state between windows, and its decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tandem.capacity.planner.demand import Demand
from tandem.capacity.planner.load_ratio import LoadRatio
from tandem.protocol.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Range:
    """A range of worker counts, both ends included."""

    least: int = 1
    most: int = 1 << 16

    def __post_init__(self) -> None:
        """Validates the range; InvalidArgument if it is empty."""
        if not 1 <= self.least <= self.most:
            raise InvalidArgument("--planner limits", f"{self.least}:{self.most} is no range of 1 or more workers")

    def clip(self, number: int) -> int:
        """Returns `number`, limited to the range."""
        return min(max(number, self.least), self.most)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the planner's changes."""

    prefill: Range = field(default_factory=Range)
    decode: Range = field(default_factory=Range)
    workers: Range | None = None
    """Workers of all roles; None = the current number: workers only change roles."""
    required_windows: int = 2
    """Consecutive windows that must want the same change before it is made."""
    required_windows_down: int = 6
    """Consecutive windows that must want to remove workers."""
    required_windows_back: int = 4
    """Consecutive windows that must want to undo a change that is not `settled` windows old."""
    cooldown: int = 2
    """Windows after a change in which no other is made."""
    settled: int = 6
    """Windows after a change or a swing of the demand before the policy learns from observed misses."""


class Direction(StrEnum):
    """The direction of a change."""

    NONE = "none"
    TO_PREFILL = "to_prefill"
    TO_DECODE = "to_decode"
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Split:
    """Workers by role; in a cluster whose workers do both, all of them are `shared`."""

    prefill: int = 0
    decode: int = 0
    shared: int = 0

    @property
    def workers(self) -> int:
        """The number of all workers."""
        return self.prefill + self.decode + self.shared

    @property
    def text(self) -> str:
        """The split as text, for logs."""
        return f"{self.shared} workers" if self.shared else f"{self.prefill}:{self.decode}"


@dataclass(frozen=True, slots=True)
class State:
    """The policy's state between windows."""

    demand: Demand | None = None
    running: float = 0.0
    """Decoding requests at the end of the last window."""
    prefill_scale: float = 1.0
    decode_scale: float = 1.0
    wanted: Direction = Direction.NONE
    windows: int = 0
    """The number of consecutive windows in which `wanted` has been wanted."""
    since: int = 1 << 16
    """Windows since the last change or swing of the demand."""
    acted: int = 1 << 16
    """Windows since the last change."""
    rest: int = 0
    """Windows until the next change is allowed."""
    last: Direction = Direction.NONE
    """The direction of the last change."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The wanted split, and the change to make now; `NONE` = no change."""

    split: Split
    change: Direction
    reason: str
    """The reason as one sentence with its figures."""
    prefill: LoadRatio | None
    """Load ratio of the current prefill workers; None = unknown. In a shared cluster both roles have the same."""
    decode: LoadRatio | None
    state: State
