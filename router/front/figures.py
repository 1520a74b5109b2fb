"""Metrics of the front processes by number; counters continue over restarts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.metrics import families as f
from tandem.metrics.registry import Reading, Registry
from tandem.net.frames import Tally


@dataclass(slots=True)
class FrontFigures:
    """The metrics of one front process."""

    number: int
    tally: Tally = field(default_factory=Tally)
    connections: int = 0
    """Number of client connections in its last heartbeat; 0 while there is no process."""
    restarts: int = 0

    def hold(self, connections: int) -> None:
        """Set the current number of client connections."""
        self.connections = connections


def show(fronts: Sequence[FrontFigures], registry: Registry) -> None:
    """Export the metrics of all front processes, read at each scrape."""

    def each(value: Callable[[FrontFigures], int]) -> Reading:
        return {(str(front.number),): float(value(front)) for front in fronts}

    registry.read(
        lambda: {
            f.FRONT_CONNECTIONS: each(lambda front: front.connections),
            f.FRONT_MESSAGES: each(lambda front: front.tally.frames),
            f.FRONT_BYTES: each(lambda front: front.tally.bytes),
            f.FRONT_RESTARTS: each(lambda front: front.restarts),
        }
    )
