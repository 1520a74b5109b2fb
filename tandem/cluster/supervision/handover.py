"""The state that a controller passes on to the next one, beyond what the workers report themselves."""

from dataclasses import dataclass

from tandem.cluster.supervision.modes import Topology
from tandem.cluster.supervision.roles import Slot


@dataclass(frozen=True, slots=True)
class Handover:
    """Facts that a controller that releases its workers passes on, beyond what the workers report themselves."""

    drained: tuple[str, ...] = ()
    """Workers that have drained and stay drained until they are wanted again."""
    rescheduling: tuple[tuple[str, str], ...] = ()
    """Workers that start elsewhere once their node has left, with that node's address."""


@dataclass(frozen=True, slots=True)
class ControllerState:
    """The workers as a controller wants them, for the controller that replaces it when it dies.

    It includes what operators and the planner have changed since the start.
    """

    slots: tuple[Slot, ...]
    """The slots of all workers that are to stay; empty = this controller does not supervise the workers."""
    topology: Topology
    handover: Handover
