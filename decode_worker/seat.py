"""A running request's seat in the batch: when it has a row, and which token that row brings.

Launches are numbered from 0. A request that has a row of each launch from its first to its last is known by sums: its
row of launch n has position `shift` + n. So nothing about it changes from step to step.
"""

from dataclasses import dataclass

from decode_worker.request import DecodeRequest

NEVER = 1 << 62
"""A launch that does not come."""


@dataclass(slots=True, eq=False)
class Seat:
    """Engine thread only; the batch's to change."""

    request: DecodeRequest
    place: int
    """Its index in the batch's columns."""
    first: int
    """Launch of its first row."""
    shift: int
    """Of the positions."""
    last: int
    """Launch of its last row; an earlier one once it was stopped."""
    heard: int
    """Launch of the first token that is not yet part of its answer."""
    absent: tuple[int, ...] = ()
    """Launches between the first and the last without a row of it, as there was no page."""
    stopped: bool = False
    """Gets no more rows."""
    over: bool = False
    """Gets no more tokens either."""

    def in_launch(self, number: int) -> bool:
        """Whether that launch has a row of it."""
        return self.first <= number <= self.last and number not in self.absent
