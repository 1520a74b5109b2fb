"""What the planner may do, what it remembers, and what it decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from planner.demand import Demand
from planner.strain import Strain
from wire.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Range:
    """Fewest and most; both are allowed."""

    least: int = 1
    most: int = 1 << 16

    def __post_init__(self) -> None:
        """InvalidArgument if nothing is in it."""
        if not 1 <= self.least <= self.most:
            raise InvalidArgument("--planner limits", f"{self.least}:{self.most} is no range of 1 or more workers")

    def clip(self, number: int) -> int:
        return min(max(number, self.least), self.most)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the planner may do."""

    prefill: Range = field(default_factory=Range)
    decode: Range = field(default_factory=Range)
    workers: Range | None = None
    """Of all roles; None = as many as there are: workers change their roles, and none come or go."""
    patience: int = 2
    """Windows in a row that must want the same, before anything is done."""
    patience_down: int = 6
    """The same of taking workers away."""
    patience_back: int = 4
    """The same of undoing a change that is not `settled` windows old."""
    cooldown: int = 2
    """Windows after a change in which there is no other."""
    settled: int = 6
    """Windows after a change or a swing until what is seen is the new state, and can be learned from."""


class Direction(StrEnum):
    """What a change does."""

    NONE = "none"
    TO_PREFILL = "to_prefill"
    TO_DECODE = "to_decode"
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Split:
    """Workers by role; in a cluster that shares steps all of them are `shared`."""

    prefill: int = 0
    decode: int = 0
    shared: int = 0

    @property
    def workers(self) -> int:
        return self.prefill + self.decode + self.shared

    @property
    def text(self) -> str:
        return f"{self.shared} workers" if self.shared else f"{self.prefill}:{self.decode}"


@dataclass(frozen=True, slots=True)
class State:
    """What is remembered from window to window."""

    demand: Demand | None = None
    running: float = 0.0
    """Requests that decoded at the end of the last window."""
    prefill_scale: float = 1.0
    decode_scale: float = 1.0
    wanted: Direction = Direction.NONE
    windows: int = 0
    """For how many in a row it has been wanted."""
    since: int = 1 << 16
    """Windows since the last change, or since the demand swung."""
    acted: int = 1 << 16
    """Windows since the last change."""
    rest: int = 0
    """Windows until the next change is allowed."""
    last: Direction = Direction.NONE
    """What the last change did."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`split` is what is wanted now; `change` says what is to be done for it, `NONE` = leave all as it is."""

    split: Split
    change: Direction
    reason: str
    """One sentence with its figures."""
    prefill: Strain | None
    """Strain of today's workers; None = nothing is known yet. In a shared cluster both are one."""
    decode: Strain | None
    state: State
