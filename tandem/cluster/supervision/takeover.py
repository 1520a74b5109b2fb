"""The state that a controller passes on to the next one, in addition to the facts that workers report themselves."""

from dataclasses import dataclass

from tandem.cluster.supervision.modes import Topology
from tandem.cluster.supervision.roles import Slot


@dataclass(frozen=True, slots=True)
class Takeover:
    """The state that a controller passes on when it releases its workers."""

    drained: tuple[str, ...] = ()
    """Workers that were drained and do not start until an operator wants them again."""
    rescheduling: tuple[tuple[str, str], ...] = ()
    """Workers that will start on another node once their node has left, each with the address of their old node."""


@dataclass(frozen=True, slots=True)
class ControllerState:
    """The target state of a controller's workers, for the controller that replaces it if it dies.

    The state includes all changes by operators and the planner since the start.
    """

    slots: tuple[Slot, ...]
    """The slots of all workers that are to stay; empty = this controller does not supervise the workers."""
    topology: Topology
    takeover: Takeover
