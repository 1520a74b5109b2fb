"""The planner's decisions, and the state that it keeps between windows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tandem.capacity.planner.demand import Demand
from tandem.capacity.planner.load_ratio import LoadRatio


class Direction(StrEnum):
    """The kind of change that the planner makes: move a worker to the other role, or add or remove workers."""

    NONE = "none"
    TO_PREFILL = "to_prefill"
    TO_DECODE = "to_decode"
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Split:
    """The number of workers by role; if all workers do both prefill and decode, all are `shared`."""

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
        if self.shared:
            return f"{self.shared} worker{'s' * (self.shared > 1)}"
        return f"{self.prefill}:{self.decode}"


@dataclass(frozen=True, slots=True)
class State:
    """The state that the policy keeps between windows; times are counted in windows."""

    demand: Demand | None = None
    running: float = 0.0
    """Number of decoding requests at the end of the last window."""
    prefill_scale: float = 1.0
    decode_scale: float = 1.0
    wanted: Direction = Direction.NONE
    windows: int = 0
    """Number of consecutive windows that recommended a change in the direction `wanted`."""
    since: int = 1 << 16
    """Windows since the last change of the split or sudden change of the demand."""
    acted: int = 1 << 16
    """Windows since the last change of the split."""
    rest: int = 0
    """Number of windows before another change is allowed."""
    last: Direction = Direction.NONE
    """The direction of the last change; `NONE` = there was no change yet."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The recommended split, and the direction of the change to make now; `NONE` = no change."""

    split: Split
    change: Direction
    reason: str
    """The reason as one sentence with its figures."""
    prefill: LoadRatio | None
    """Load ratio of the current prefill workers; None = unknown. In a shared cluster both roles have the same ratio."""
    decode: LoadRatio | None
    state: State
