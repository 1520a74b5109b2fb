"""What operators see of front processes, each by its number, over all its lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from telemetry import families as f
from telemetry.board import Board, Reading
from wire.frames import Tally


@dataclass(slots=True)
class FrontFigures:
    """Of one of them."""

    number: int
    tally: Tally = field(default_factory=Tally)
    connections: int = 0
    """Of clients, as it said last; 0 while there is no process."""
    restarts: int = 0

    def hold(self, connections: int) -> None:
        """So many now."""
        self.connections = connections


def show(fronts: Sequence[FrontFigures], board: Board) -> None:
    """At each scrape."""

    def each(value: Callable[[FrontFigures], int]) -> Reading:
        return {(str(front.number),): float(value(front)) for front in fronts}

    board.read(
        lambda: {
            f.FRONT_CONNECTIONS: each(lambda front: front.connections),
            f.FRONT_MESSAGES: each(lambda front: front.tally.frames),
            f.FRONT_BYTES: each(lambda front: front.tally.bytes),
            f.FRONT_RESTARTS: each(lambda front: front.restarts),
        }
    )
