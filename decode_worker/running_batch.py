"""The running batch as columns: what a step needs of every request, changed for all of them at once.

A request has a place from its joining to its leaving, which is its index into every column. So a step of hundreds of
requests that all go on is some operations on arrays; only what joins, ends, leaves or needs a page is looked at one by
one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from decode_worker.request import DecodeRequest
from engine.draws import SETTINGS, Draws, History, settings_of
from engine.seeded import start_of
from engine.token_rows import FROM_HOST, TokenRows
from wire.messages import RoutedTokens, SamplingParams, StepTokens

Places = NDArray[np.intp]

_Number = TypeVar("_Number", np.int32, np.int64)

_PAGES_AT_FIRST = 16
_NO_TOKEN = -1
_FRESH_MAX = 32
"""Tokens of a request that are columns before they become part of its answer: to append to hundreds of lists each step
takes longer than all else that a step's tokens need.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """Requests that go through steps together, row by row, and what they are as long as they do."""

    places: Places
    requests: Sequence[DecodeRequest]
    request_ids: Sequence[str]
    attempts: Sequence[int]
    routers: Sequence[str]
    owners: NDArray[np.intp]
    """Which of the routers each row's request is from."""
    samplings: Sequence[SamplingParams]
    histories: Sequence[History | None]
    settings: NDArray[np.float64]
    starts: NDArray[np.uint64]
    penalized: bool
    scored: bool

    def __len__(self) -> int:
        return len(self.requests)


class RunningBatch:
    """Engine thread only. The requests' pages are theirs; the columns hold copies of their numbers."""

    def __init__(self, places: int, page_tokens: int) -> None:
        """`places` is how many requests run at first; more make it larger."""
        self.page_tokens = page_tokens
        self._requests: dict[int, DecodeRequest] = {}
        self._free: list[int] = []
        self._going = 0
        self._cohort: Cohort | None = None
        """The newest, None once anybody has joined or left."""
        self._here = np.zeros(0, dtype=np.int64)
        """Answer tokens that are here."""
        self._in_flight = np.zeros(0, dtype=np.int64)
        """Launched steps with a row of it whose tokens are not here yet."""
        self._next = np.zeros(0, dtype=np.int64)
        """Position of the next row's token: all before it are here or on their way."""
        self._end = np.zeros(0, dtype=np.int64)
        """Where there is no next row any more; 0 for those that stopped and for places without a request."""
        self._room = np.zeros(0, dtype=np.int64)
        """Positions that its pages have."""
        self._draw = np.zeros(0, dtype=np.int64)
        """Number of a row's draw, less the row's position."""
        self._limit = np.zeros(0, dtype=np.int64)
        """Most tokens of the answer."""
        self._newest = np.zeros(0, dtype=np.int64)
        """The last token that is here."""
        self._fresh = np.zeros((0, _FRESH_MAX), dtype=np.int64)
        """The newest tokens that are here and not yet in the request's own `answer`."""
        self._freshly = np.zeros(0, dtype=np.int64)
        """How many these are."""
        self._fresh_max = np.zeros(0, dtype=np.int64)
        """How many they may be until the next step."""
        self._row = np.zeros(0, dtype=np.int32)
        """In the newest step, if it is in flight."""
        self._held = np.zeros(0, dtype=np.int32)
        """Pages."""
        self._stopped = np.zeros(0, dtype=np.bool_)
        """Gets no more rows."""
        self._over = np.zeros(0, dtype=np.bool_)
        """Gets no more tokens either."""
        self._untold = np.zeros(0, dtype=np.bool_)
        """There is more to tell of it than its next token."""
        self._settings = np.zeros((0, SETTINGS), dtype=np.float64)
        self._starts = np.zeros(0, dtype=np.uint64)
        self._stops = np.zeros((0, 1), dtype=np.int64)
        """Tokens that end the answer."""
        self._table = np.zeros((0, _PAGES_AT_FIRST), dtype=np.int32)
        self._make_places(places)

    def __len__(self) -> int:
        """Requests that go on."""
        return self._going

    @property
    def requests(self) -> Iterable[DecodeRequest]:
        """All of them, those that stopped and are in a launched step included."""
        return self._requests.values()

    def join(self, request: DecodeRequest) -> None:
        """It has `token_ids`, `pages`, `ending` and, if need be, a `history`."""
        if not self._free:
            self._make_places(max(1, len(self._here)))
        here = len(request.answer)
        place = request.place = self._free.pop()
        request.batch = self
        self._going += 1
        self._requests[place] = request
        self._cohort = None
        sampling = request.reservation.sampling
        self._here[place] = here
        # Who penalizes looks back on every token.
        self._fresh_max[place] = _FRESH_MAX if request.history is None else 1
        self._next[place] = request.prompt_tokens + here - 1
        self._end[place] = request.prompt_tokens + request.ending.limit - 1
        self._draw[place] = request.first_draw - request.prompt_tokens
        self._limit[place] = request.ending.limit
        self._newest[place] = request.answer[-1]
        self._untold[place] = bool(request.edges) or sampling.logprobs is not None
        self._settings[place] = settings_of(sampling)
        self._starts[place] = start_of(sampling.seed)
        stops = sorted(request.ending.stops)
        self._stops = _widened(self._stops, len(stops), _NO_TOKEN)
        self._stops[place] = _NO_TOKEN
        self._stops[place, : len(stops)] = stops
        self._held[place] = 0
        self._table[place] = 0
        self.grown(request)

    def grown(self, request: DecodeRequest) -> None:
        """It has more pages than before."""
        place, held, pages = request.place, int(self._held[request.place]), request.pages
        self._table = _widened(self._table, len(pages), 0)
        self._table[place, held : len(pages)] = pages[held:]
        self._held[place] = len(pages)
        self._room[place] = len(pages) * self.page_tokens

    def stop(self, request: DecodeRequest) -> None:
        """No more rows for it; the tokens of launched steps are still its own."""
        self._going -= int(not self._stopped[request.place])
        self._stopped[request.place] = True
        self._end[request.place] = 0

    def drop(self, request: DecodeRequest) -> None:
        """No more rows for it, and what is drawn for it in launched steps counts no more."""
        self.stop(request)
        self._over[request.place] = True

    def gone(self) -> list[DecodeRequest]:
        """Who was stopped or dropped and is in no launched step any more."""
        done = np.flatnonzero(self._stopped & (self._in_flight == 0))
        return [self._requests[place] for place in done.tolist()]

    def leave(self, request: DecodeRequest) -> None:
        """Its place is free; it is in no launched step."""
        self.stop(request)
        self.hand_over(request)
        place, request.batch = request.place, None
        del self._requests[place]
        self._free.append(place)
        self._in_flight[place] = 0
        self._stopped[place] = self._over[place] = False
        self._cohort = None

    def hand_over(self, request: DecodeRequest) -> None:
        """Make the tokens that are here part of its `answer`."""
        fresh = self._freshly[request.place]
        if fresh:
            request.answer.extend(self._fresh[request.place, :fresh].tolist())
            self._freshly[request.place] = 0

    def in_flight(self, request: DecodeRequest) -> int:
        """Launched steps with a row of it whose tokens are not here yet."""
        return int(self._in_flight[request.place])

    def due(self) -> Places:
        """Who needs a row: not those that stopped, nor those that end with a token that is on its way."""
        return np.flatnonzero(self._next < self._end)

    def without_page(self, places: Places) -> list[DecodeRequest]:
        """Those who have no page for their next row."""
        short = places[self._next[places] >= self._room[places]]
        return [self._requests[place] for place in short.tolist()]

    def with_page(self, places: Places) -> Places:
        """The others."""
        return places[self._next[places] < self._room[places]]

    def launch(self, places: Places) -> tuple[TokenRows, Cohort]:
        """One row for each: its newest token, here or on its way, takes the position after those before it."""
        cohort = self._cohort_of(places)
        positions = self._next[places]
        rows = TokenRows(
            token_ids=self._newest[places],
            starts=positions,
            sources=np.where(self._in_flight[places] > 0, self._row[places], np.int32(FROM_HOST)),
            table=self._table.take(places, axis=0),
            held=self._held[places],
            draws=Draws(
                cohort.samplings,
                cohort.histories,
                cohort.settings,
                cohort.starts,
                self._draw[places] + positions,
                cohort.penalized,
                cohort.scored,
            ),
        )
        self._next[places] = positions + 1
        self._in_flight[places] += 1
        self._row[places] = np.arange(len(places))
        return rows, cohort

    def land(self, cohort: Cohort, token_ids: Sequence[int | None]) -> "Landed":
        """The tokens of a launched step are here; those of requests that are over are dropped."""
        places, tokens = cohort.places, np.array(token_ids, dtype=np.int64)
        self._in_flight[places] -= 1
        rows = np.flatnonzero(~self._over[places])
        if len(rows) < len(cohort):
            places, tokens = places[rows], tokens[rows]
        indices = self._here[places]
        self._here[places] = indices + 1
        self._newest[places] = tokens
        fresh = self._freshly[places]
        self._fresh[places, fresh] = tokens
        self._freshly[places] = fresh + 1
        for place in places[fresh + 1 >= self._fresh_max[places]].tolist():
            self.hand_over(self._requests[place])
        ends = (self._stops[places] == tokens[:, None]).any(axis=1) | (indices + 1 >= self._limit[places])
        return Landed(rows, indices, tokens, ends | self._untold[places])

    def alike(self) -> int:
        """How many more steps have a row of everybody and end nobody; 0 if anybody has more to tell than a token. Pages
        are another question.
        """
        due = self.due()
        if not len(due) or len(due) < len(self._requests) or self._untold[due].any():
            return 0
        return int((self._end[due] - self._next[due]).min())

    def paged(self) -> int:
        """How many more steps need no more pages."""
        due = self.due()
        return int((self._room[due] - self._next[due]).min())

    def skip(self, steps: int) -> None:
        """As if so many steps, `alike` and `paged`, had been launched behind those in flight, and as many had landed,
        with tokens 0. For whoever has no device.
        """
        due = self.due()
        self._next[due] += steps
        self._here[due] += steps
        self._newest[due] = 0
        for request in self._requests.values():
            request.token_ids.extend([0] * steps)

    def told(self, request: DecodeRequest) -> None:
        """What there was to tell of it is told; log probabilities come with every token."""
        self._untold[request.place] = request.reservation.sampling.logprobs is not None

    def _cohort_of(self, places: Places) -> Cohort:
        known = self._cohort
        if known is not None and np.array_equal(known.places, places):
            return known
        requests = [self._requests[place] for place in places.tolist()]
        reservations = [request.reservation for request in requests]
        samplings = [each.sampling for each in reservations]
        histories = [request.history for request in requests]
        owners = [each.router_id for each in reservations]
        routers = {router: number for number, router in enumerate(dict.fromkeys(owners))}
        found = self._cohort = Cohort(
            places,
            requests,
            [each.ref.request_id for each in reservations],
            [each.ref.attempt for each in reservations],
            list(routers),
            np.array([routers[router] for router in owners]),
            samplings,
            histories,
            self._settings[places],
            self._starts[places],
            any(history is not None for history in histories),
            any(each.logprobs is not None for each in samplings),
        )
        return found

    def _make_places(self, more: int) -> None:
        first = len(self._here)
        for name, column in list(vars(self).items()):
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate((column, np.zeros((more, *column.shape[1:]), dtype=column.dtype))))
        self._free.extend(range(first + more - 1, first - 1, -1))


@dataclass(frozen=True, slots=True, eq=False)
class Landed:
    """Tokens that are part of answers now, as columns [n]."""

    rows: Places
    """Of the step."""
    indices: NDArray[np.int64]
    """Each token's number in its answer."""
    token_ids: NDArray[np.int64]
    special: NDArray[np.bool_]
    """Where it may be the last, or there is more to tell."""

    def specials(self) -> list[tuple[int, int, int]]:
        """The row, the number and the token of each special one."""
        at = np.flatnonzero(self.special)
        return list(zip(self.rows[at].tolist(), self.indices[at].tolist(), self.token_ids[at].tolist(), strict=True))

    def usual(self, cohort: Cohort) -> list[RoutedTokens]:
        """All others, by router; `cohort` is the step's."""
        usual, found = ~self.special, []
        for number, router in enumerate(cohort.routers):
            mine = usual if len(cohort.routers) == 1 else usual & (cohort.owners[self.rows] == number)
            if mine.any():
                found.append(RoutedTokens(router, self._tokens(cohort, mine)))
        return found

    def _tokens(self, cohort: Cohort, mine: NDArray[np.bool_]) -> StepTokens:
        names, attempts, indices, tokens = cohort.request_ids, cohort.attempts, self.indices, self.token_ids
        if np.count_nonzero(mine) < len(cohort):
            rows, indices, tokens = self.rows[mine].tolist(), indices[mine], tokens[mine]
            names, attempts = [names[row] for row in rows], [attempts[row] for row in rows]
        return StepTokens(names, attempts, indices.tolist(), tokens.tolist())


def _widened(column: NDArray[_Number], width: int, fill: int) -> NDArray[_Number]:
    """[places, at least width]"""
    if width <= column.shape[1]:
        return column
    wide = np.full((len(column), max(width, 2 * column.shape[1])), fill, dtype=column.dtype)
    wide[:, : column.shape[1]] = column
    return wide
