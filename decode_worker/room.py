"""How much this worker may still promise, and when it had better promise nothing.

A request is promised what it is expected to fill (`costs/answer_length.py`), so that more of them run at once than if
each had the longest answer. One that has outgrown its forecast is expected anew to fill more; where there is no page
for it, a younger one gives way (`preemption.py`), and until that one is back so much is left for it.
"""

from collections.abc import Callable, Sequence

from costs.answer_length import AnswerLengths
from decode_worker.config import DecodeConfig
from decode_worker.credits import Credits
from decode_worker.request import DecodeRequest
from engine.cache.prefix_cache import Prefix, PrefixCache
from kv_transfer.lease import LeaseTable
from kv_transfer.lost_pages import LostPages
from wire.ending import kv_tokens, pages_for
from wire.errors import InvalidArgument, ResourceExhausted, RoleClosed
from wire.messages import ModelFacts, Reservation

AWAY_S = 1.0
"""For how long pages are left for a request that gave way: long enough to come back if nobody else has room."""


class Room:
    """Pages promised to requests, prompt and answer, until each is over. Guarded by the admission's lock.

    Quarantined pages are room lost for as long as their writers are silent. A worker that has lost a large part of its
    pool this way says so and promises nothing, until enough of it is back: small and full, it would look healthy.
    """

    def __init__(
        self,
        config: DecodeConfig,
        worker_id: str,
        cache: PrefixCache,
        leases: LeaseTable,
        *,
        model: ModelFacts,
        clock: Callable[[], float],
    ) -> None:
        self._lost = LostPages(worker_id, config.quarantine_share_max)
        self._config = config
        self._worker_id = worker_id
        self._page_tokens = cache.page_tokens
        self._pool = cache.pool
        self._leases = leases
        self._model = model
        self._clock = clock
        self._limit = cache.pool.total
        self._credits = Credits(cache)
        self._lengths = AnswerLengths()
        self._away: dict[tuple[str, str], tuple[int, float]] = {}
        """Requests that gave way, by router and name: pages that are left for each, and until when."""
        self._closed = ""

    @property
    def not_ready(self) -> str:
        """Why nothing is promised for now, in words; empty = promises are made. `look` keeps it up to date."""
        return self._lost.not_ready

    @property
    def committed(self) -> int:
        """Pages of all requests that are not over, promised and held."""
        return self._credits.committed

    @property
    def left(self) -> int:
        """See `Credits.left`."""
        return self._credits.left

    def expected_pages(self, reservation: Reservation, tokens: int) -> int:
        """Pages that prompt and answer are going to fill, now that the answer has so many tokens."""
        return pages_for(self._stored(reservation, self._expected(reservation, tokens)), self._page_tokens)

    def take(self, reservation: Reservation, prefix: Prefix) -> tuple[int, int]:
        """Promise the expected pages, less those of the prefix that are cached, which are read from now on.

        Returns how many are expected and how many of them are promised. ResourceExhausted with a retry hint when there
        are none now, InvalidArgument when the longest answer will never fit, RoleClosed while closed.
        """
        self.look()
        if self._closed:
            raise RoleClosed(f"worker {self._worker_id} takes no answers, as it {self._closed}; ask another one")
        sampling, prompt_tokens = reservation.sampling, len(reservation.prompt_token_ids)
        most = pages_for(self._stored(reservation, sampling.max_tokens), self._page_tokens)
        if most > self._limit:
            raise InvalidArgument(
                "max_tokens",
                f"prompt and answer need {most} KV pages and worker {self._worker_id} has {self._limit};"
                " ask for fewer tokens",
            )
        if self.not_ready:
            raise self._come_back(f"worker {self._worker_id} promises nothing for now: {self.not_ready}")
        pages = self.expected_pages(reservation, reservation.answered)
        prompt_pages = pages_for(prompt_tokens, self._page_tokens)
        aside = self._set_aside(reservation, self._limit - pages)
        try:
            promised = self._credits.enter(prefix, pages, prompt_pages, prompt_tokens, aside)
        except ResourceExhausted:
            message = f"worker {self._worker_id} has no KV pages left to promise; come back later"
            raise self._come_back(message) from None
        self._away.pop((reservation.router_id, reservation.ref.request_id), None)
        return pages, promised

    def take_back(self, pages: int, promised: int, prompt_pages: int, skipped: int) -> None:
        """What `take` gave becomes no request."""
        self._credits.give_back(pages, promised, prompt_pages, prompt_pages - skipped)

    def spend_on_prompt(self, request: DecodeRequest, pages: int) -> None:
        """So many promised pages were taken from the pool for its lease."""
        self._credits.spend_on_prompt(request, pages)

    def grow(self, request: DecodeRequest, *, beyond_limit: bool = False) -> bool:
        """One more page for a running request; False if there is none, or none within the limit."""
        if not request.promised:
            pages = self.expected_pages(request.reservation, len(request.token_ids) + request.in_flight)
            self._credits.extend(request, max(pages, len(request.pages) + 1))
        return self._credits.grow(request, beyond_limit=beyond_limit)

    def grow_all(self, requests: Sequence[DecodeRequest]) -> bool:
        """One more page for each of these; False, and nothing has changed, if that is not to be had so simply."""
        return all(request.promised for request in requests) and self._credits.grow_all(requests)

    def give_back(self, request: DecodeRequest) -> None:
        """It is over, its own pages are somebody else's. What it reads is the caller's to let go."""
        self._credits.leave(request)

    def expect_back(self, request: DecodeRequest) -> None:
        """It gave way: leave it room to come back, for a while. Before `give_back`."""
        self._away[request.key] = request.committed, self._clock() + AWAY_S

    def learn(self, request: DecodeRequest) -> None:
        """An answer has ended."""
        self._lengths.learn(request.reservation.sampling.max_tokens, len(request.token_ids))

    def close(self, why: str) -> None:
        """Promise nothing until `open`."""
        self._closed = why

    def open(self) -> None:
        """Make promises."""
        self._closed = ""

    def limit(self, max_pages: int | None) -> None:
        """Promise so many pages at most from now on, quarantined ones aside; None, as at first, = the whole pool. What
        is promised already stays so.
        """
        self._limit = self._pool.total if max_pages is None else max_pages
        self._credits.limit(max_pages)

    def look(self) -> None:
        """See how much lies in quarantine."""
        self._lost.look(self._pool.counts().quarantined, self._limit, self._why)

    def _why(self) -> str:
        writers = ", ".join(self._leases.silent_writers()) or "prefill workers"
        return (
            f"are in quarantine, as {writers} may still write to them;"
            " they are free once those workers answer or have ended: look at them, or restart them"
        )

    def _expected(self, reservation: Reservation, tokens: int) -> int:
        sampling = reservation.sampling
        return self._lengths.expect(sampling.max_tokens, tokens, to_the_limit=sampling.runs_to_limit)

    def _stored(self, reservation: Reservation, answer: int) -> int:
        """Positions whose KV is stored with an answer of so many tokens."""
        longest = kv_tokens(reservation.question_tokens, reservation.sampling, self._model)
        shortest = len(reservation.prompt_token_ids)
        return max(shortest, min(longest, reservation.question_tokens + answer - 1))

    def _set_aside(self, reservation: Reservation, most: int) -> int:
        """Pages, at most `most`, for those that gave way, unless it is one of them."""
        now = self._clock()
        self._away = {key: entry for key, entry in self._away.items() if entry[1] > now}
        if (reservation.router_id, reservation.ref.request_id) in self._away:
            return 0
        return min(most, sum(pages for pages, _ in self._away.values()))

    def _come_back(self, message: str) -> ResourceExhausted:
        return ResourceExhausted(message, retry_after_s=self._config.retry_after_s)
