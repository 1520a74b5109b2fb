"""Tokens that are here and not yet part of their answers: columns by launch and place.

To append to hundreds of lists each step takes longer than all else that a step's tokens need.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from decode_worker.columns import Places
from decode_worker.seat import Seat

HEARD_TOGETHER = 64
"""Tokens of a request that are columns before they become part of its answer."""


class Unheard:
    """Owned by the batch. An answer is whole once its seat has been heard."""

    def __init__(self) -> None:
        self.landings = 0
        """Launches whose tokens are here."""
        self._tokens = np.zeros((HEARD_TOGETHER, 0), dtype=np.int64)

    def widen(self, more: int) -> None:
        """So many more places."""
        self._tokens = np.concatenate((self._tokens, np.zeros((HEARD_TOGETHER, more), dtype=np.int64)), axis=1)

    def land(self, number: int, places: Places, tokens: NDArray[np.int64], seats: Collection[Seat]) -> None:
        """The tokens of launch `number`, by place; `seats` are all there are."""
        self._tokens[number % HEARD_TOGETHER, places] = tokens
        self.landings = number + 1
        if not self.landings % HEARD_TOGETHER:
            self._hear_all(seats)

    def hear(self, seat: Seat) -> None:
        """Make the tokens that are here part of its request's `answer`."""
        end = min(self.landings, seat.last + 1)
        if not seat.over and seat.heard < end:
            first = self.landings - 1 - (self.landings - 1) % HEARD_TOGETHER
            here = self._tokens[seat.heard - first : end - first, seat.place].tolist()
            if seat.absent:
                here = [token for number, token in enumerate(here, seat.heard) if number not in seat.absent]
            seat.request.answer.extend(here)
            seat.heard = end

    def skip(self, steps: int, seats: Collection[Seat]) -> None:
        """As if so many more launches had landed, with a token 0 for each of `seats`, which are all there are."""
        for seat in seats:
            self.hear(seat)
            seat.request.answer.extend([0] * steps)
            seat.heard += steps
        self.landings += steps

    def _hear_all(self, seats: Collection[Seat]) -> None:
        """Before the columns are used again. All at once, as that takes a fraction of one by one."""
        columns, end = self._tokens.T.tolist(), self.landings
        for seat in seats:
            if seat.absent or seat.over or seat.last < end - 1:
                self.hear(seat)
            elif seat.heard < end:
                seat.request.answer.extend(columns[seat.place][seat.heard - end :])
                seat.heard = end
