"""What steps need of every running request, as columns by its place: written when it joins and when it gets a page."""

import numpy as np
from numpy.typing import NDArray

from decode_worker.seat import Seat
from engine.draws import SETTINGS, settings_of
from engine.seeded import start_of

Places = NDArray[np.intp]

_PAGES_AT_FIRST = 16
_EMPTY = -1
"""Last launch of a place without a request: no launch."""


class Columns:
    """Owned by the batch. The requests' pages are theirs; here are copies of their numbers."""

    def __init__(self) -> None:
        self.seats = np.zeros(0, dtype=np.object_)
        self.request_ids = np.zeros(0, dtype=np.object_)
        self.samplings = np.zeros(0, dtype=np.object_)
        self.histories = np.zeros(0, dtype=np.object_)
        self.attempts = np.zeros(0, dtype=np.int64)
        self.routers = np.zeros(0, dtype=np.object_)
        self.last = np.zeros(0, dtype=np.int64)
        """See `Seat`."""
        self.shift = np.zeros(0, dtype=np.int64)
        self.index = np.zeros(0, dtype=np.int64)
        """Number of a row's token in the answer, less the row's position."""
        self.draw = np.zeros(0, dtype=np.int64)
        """Number of a row's draw, less the row's position."""
        self.penalized = np.zeros(0, dtype=np.bool_)
        self.scored = np.zeros(0, dtype=np.bool_)
        """Wants log probabilities."""
        self.newest = np.zeros(0, dtype=np.int64)
        """The last token that is here."""
        self.settings = np.zeros((0, SETTINGS), dtype=np.float64)
        self.seeds = np.zeros(0, dtype=np.uint64)
        """`seeded.start_of`."""
        self.held = np.zeros(0, dtype=np.int32)
        """Pages."""
        self.table = np.zeros((0, _PAGES_AT_FIRST), dtype=np.int32)

    def __len__(self) -> int:
        return len(self.last)

    def widen(self, more: int) -> range:
        """So many more places → these."""
        first = len(self)
        for name, column in list(vars(self).items()):
            setattr(self, name, np.concatenate((column, np.zeros((more, *column.shape[1:]), dtype=column.dtype))))
        self.last[first:] = _EMPTY
        return range(first, first + more)

    def enter(self, seat: Seat) -> None:
        """Somebody takes a place; its pages are still to be copied."""
        place, request, sampling = seat.place, seat.request, seat.request.reservation.sampling
        self.seats[place] = seat
        self.request_ids[place] = request.reservation.ref.request_id
        self.attempts[place] = request.reservation.ref.attempt
        self.routers[place] = request.reservation.router_id
        self.samplings[place] = sampling
        self.histories[place] = request.history
        self.penalized[place] = request.history is not None
        self.scored[place] = sampling.logprobs is not None
        self.newest[place] = request.answer[-1]
        self.settings[place] = settings_of(sampling)
        self.seeds[place] = start_of(sampling.seed)
        self.index[place] = 1 - request.prompt_tokens
        self.draw[place] = request.first_draw - request.prompt_tokens
        self.held[place] = 0
        self.table[place] = 0
        self.move(seat)

    def move(self, seat: Seat) -> None:
        """It has its rows in other launches than before."""
        self.last[seat.place] = seat.last
        self.shift[seat.place] = seat.shift

    def leave(self, seat: Seat) -> None:
        """The place is nobody's, and keeps nothing alive."""
        place = seat.place
        self.last[place] = _EMPTY
        self.seats[place] = self.samplings[place] = self.histories[place] = None

    def copy_pages(self, seat: Seat) -> None:
        """It has more pages than before."""
        place, pages = seat.place, seat.request.pages
        held, has = int(self.held[place]), len(pages)
        if has > self.table.shape[1]:
            wide = np.zeros((len(self), max(has, 2 * self.table.shape[1])), dtype=self.table.dtype)
            wide[:, : self.table.shape[1]] = self.table
            self.table = wide
        if has == held + 1:
            self.table[place, held] = pages[held]
        else:
            self.table[place, held:has] = pages[held:]
        self.held[place] = has
