"""The running batch: who has a row of the next launch, and what becomes of the tokens of those before.

A request takes a seat when it joins and leaves it when it is over (`seat.py`). Its rows, tokens and pages follow from
the number of the launch, so nothing is counted from step to step: that a request ends, or needs a page, is noted under
the number of the launch in which it will, and a step of hundreds of requests that all go on looks at none of them.
"""

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from decode_worker.cohort import Cohort
from decode_worker.columns import Columns
from decode_worker.landed import Landed
from decode_worker.request import DecodeRequest
from decode_worker.seat import NEVER, Seat
from decode_worker.unheard import Unheard
from engine.token_rows import TokenRows


class RunningBatch:
    """Engine thread only. The requests' pages are theirs."""

    def __init__(self, places: int, page_tokens: int) -> None:
        """`places` is how many requests run at first; more make it larger."""
        self.page_tokens = page_tokens
        self._columns = Columns()
        self._unheard = Unheard()
        self._free: list[int] = []
        self._seats: dict[DecodeRequest, Seat] = {}
        self._going = 0
        self._launches = 0
        self.flying: deque[tuple[int, Cohort]] = deque()
        """Launches whose tokens are not here yet, oldest first, each with its number."""
        self._cohort: Cohort | None = None
        """Of the next launch, if nobody comes or goes before."""
        self._lasts: dict[int, list[Seat]] = {}
        """Whose last launch that is, by its number; here and below some may have stopped since."""
        self._turns: dict[int, list[Seat]] = {}
        """Who needs one more page then."""
        self._short: list[Seat] = []
        """Who needs one now."""
        self._stopping: list[Seat] = []
        """Who stopped and has not left."""
        self._untold: list[Seat] = []
        """Of whom there is more to tell than the next token."""
        self._looking_back: list[Seat] = []
        """Who has penalties: its answer is whole after each step."""
        self._stops: dict[frozenset[int], int] = {}
        """Sets of tokens that end an answer, and how many of the requests have each."""
        self._ending: frozenset[int] = frozenset()
        """All of these tokens."""
        self._make_places(places)

    def __len__(self) -> int:
        """Requests that go on."""
        return self._going

    @property
    def requests(self) -> Collection[DecodeRequest]:
        """All of them, those that stopped and are in a launched step included."""
        return self._seats.keys()

    def join(self, request: DecodeRequest) -> None:
        """It has `token_ids`, `pages`, `ending` and, if need be, a `history`."""
        if not self._free:
            self._make_places(max(1, len(self._columns)))
        ending, now = request.ending, self._launches
        position = request.prompt_tokens + len(request.answer) - 1
        last = now + request.prompt_tokens + ending.limit - 2 - position
        seat = self._seats[request] = Seat(request, self._free.pop(), now, position - now, last, now)
        request.batch = self
        self._going += 1
        self._cohort = None
        self._columns.enter(seat)
        self._lasts.setdefault(last, []).append(seat)
        if ending.stops:
            self._stops[ending.stops] = self._stops.get(ending.stops, 0) + 1
            self._ending |= ending.stops
        if request.edges or request.reservation.sampling.logprobs is not None:
            self._untold.append(seat)
        if request.history is not None:
            self._looking_back.append(seat)
        self._copy_pages(seat)

    def grown(self, request: DecodeRequest) -> None:
        """It has a page for its next row now."""
        seat = self._seats[request]
        self._short.remove(seat)
        self._copy_pages(seat)

    def stop(self, request: DecodeRequest) -> None:
        """No more rows for it; the tokens of launched steps are still its own."""
        seat = self._seats[request]
        if seat.stopped:
            return
        self._going -= 1
        seat.stopped = True
        self._stopping.append(seat)
        if seat.last >= self._launches:
            seat.last = self._launches - 1
            self._columns.move(seat)
            self._cohort = None

    def drop(self, request: DecodeRequest) -> None:
        """No more rows for it, and what is drawn for it in launched steps counts no more."""
        self.stop(request)
        self.hear(request)
        self._seats[request].over = True

    def gone(self) -> list[DecodeRequest]:
        """Who was stopped or dropped and is in no launched step any more."""
        return [seat.request for seat in self._stopping if not self.in_flight(seat.request)]

    def leave(self, request: DecodeRequest) -> None:
        """Its place is free; it is in no launched step."""
        self.stop(request)
        self.hear(request)
        seat, stops = self._seats.pop(request), request.ending.stops
        request.batch = None
        self._columns.leave(seat)
        self._free.append(seat.place)
        for some in (self._stopping, self._short, self._untold, self._looking_back):
            if seat in some:
                some.remove(seat)
        if stops:
            self._stops[stops] -= 1
            if not self._stops[stops]:
                del self._stops[stops]
                self._ending = frozenset().union(*self._stops)

    def hear(self, request: DecodeRequest) -> None:
        """Make the tokens that are here part of its `answer`."""
        self._unheard.hear(self._seats[request])

    def in_flight(self, request: DecodeRequest) -> int:
        """Launched steps with a row of it whose tokens are not here yet."""
        seat = self._seats[request]
        return sum(seat.in_launch(number) for number, _ in self.flying)

    @property
    def is_short(self) -> bool:
        """Whether somebody who was without a page still is."""
        return bool(self._short)

    def without_page(self) -> list[DecodeRequest]:
        """Who has no page for a row of the next launch."""
        now, turns = self._launches, self._turns
        if now in turns:
            self._short += [seat for seat in turns.pop(now) if not seat.stopped]
        if not self._short:
            return []
        due = sorted((seat for seat in self._short if seat.last >= now), key=_place)
        return [seat.request for seat in due]

    def launch(self) -> TokenRows | None:
        """One row for each that is due and has a page: its newest token, here or on its way, takes the position after
        those before it. Not for those that end with a token that is on its way. None if there is nobody.
        """
        number = self._launches
        cohort = self._together(number)
        if cohort is None:
            return None
        for seat in self._short:
            self._miss(seat, number)
        before = self.flying[-1][1] if self.flying else None
        self.flying.append((number, cohort))
        self._launches = number + 1
        if number in self._lasts or self._short:
            self._cohort = None
        return TokenRows(len(cohort), cohort.context_tokens(number), lambda: cohort.rows(number, before))

    def land(self, token_ids: Sequence[int]) -> Landed:
        """The tokens of the oldest launched step are here, one for each of its rows; those of requests that are over
        are dropped.
        """
        number, cohort = self.flying.popleft()
        tokens = np.array(token_ids, dtype=np.int64)
        self._columns.newest[cohort.places] = tokens
        self._unheard.land(number, cohort.places, tokens, self._seats.values())
        for seat in self._looking_back:
            self._unheard.hear(seat)
        over, special = self._not_usual(number, cohort, token_ids)
        return Landed(number, cohort, token_ids, sorted(special), over | special)

    def told(self, request: DecodeRequest) -> None:
        """What there was to tell of it is told; log probabilities come with every token."""
        seat = self._seats[request]
        if seat in self._untold and request.reservation.sampling.logprobs is None:
            self._untold.remove(seat)

    def alike(self) -> int:
        """How many more steps have a row of everybody and end nobody; 0 if anybody has more to tell than a token. Pages
        are another question.
        """
        cohort = self._cohort
        if self._untold or self._stopping or cohort is None or len(cohort) < len(self._seats):
            return 0
        return cohort.first_end + 1 - self._launches

    def paged(self) -> int:
        """How many more steps need no more pages, at least."""
        return 0 if self._short else min(self._turns, default=NEVER) - self._launches

    def skip(self, steps: int) -> None:
        """As if so many steps, `alike` and `paged`, had been launched behind those in flight, and as many had landed,
        with tokens 0. For whoever has no device.
        """
        self._unheard.skip(steps, self._seats.values())
        self._columns.newest[:] = 0
        self._launches += steps
        if self._launches - 1 in self._lasts:
            self._cohort = None
        self.flying = deque((number + steps, cohort) for number, cohort in self.flying)

    def _together(self, number: int) -> Cohort | None:
        """Who is in this launch."""
        if self._cohort is None or self._short:
            places = np.flatnonzero(self._columns.last >= number)
            if self._short:
                places = np.setdiff1d(places, [seat.place for seat in self._short])
            if not len(places):
                return None
            self._cohort = Cohort(self._columns, places)
        return self._cohort

    def _miss(self, seat: Seat, number: int) -> None:
        """A launch without a row of somebody who is due: all of its rows come one launch later."""
        if seat.last < number:
            return
        if seat.first == number:
            seat.first = seat.heard = number + 1
        else:
            seat.absent = (*seat.absent, number)
        seat.shift -= 1
        seat.last += 1
        self._lasts.setdefault(seat.last, []).append(seat)
        self._columns.move(seat)

    def _not_usual(self, number: int, cohort: Cohort, token_ids: Sequence[int]) -> tuple[set[int], set[int]]:
        """Rows of requests that are over, and others that need a look."""
        over: set[int] = set()
        if self._stopping:
            over = {row for row, seat in enumerate(cohort.seats) if seat.over}
        seats = [seat for seat in self._lasts.pop(number, ()) if seat.last == number and seat.in_launch(number)]
        if self._untold:
            seats += [seat for seat in self._untold if seat.in_launch(number)]
        special = {cohort.seats.index(seat) for seat in seats} if seats else set()
        if self._ending and not self._ending.isdisjoint(token_ids):
            ends = enumerate(zip(token_ids, cohort.seats, strict=True))
            special |= {row for row, (token, seat) in ends if token in seat.request.ending.stops}
        return over, special - over

    def _copy_pages(self, seat: Seat) -> None:
        self._columns.copy_pages(seat)
        turn = len(seat.request.pages) * self.page_tokens - seat.shift
        if turn <= self._launches:
            self._short.append(seat)
        elif turn <= seat.last:
            self._turns.setdefault(turn, []).append(seat)

    def _make_places(self, more: int) -> None:
        self._free.extend(reversed(self._columns.widen(more)))
        self._unheard.widen(more)


def _place(seat: Seat) -> int:
    return seat.place
