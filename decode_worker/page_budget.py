"""The page budget of the decode half: what each request claims, what the pool promises, and when nothing is promised.

Two words for a request's pages, which the prefill half uses too:
  claimed   may still be taken from the pool. Prompt and answer are expected to fill them
  (`tandem/cost_model/answer_length.py`), so
            that more requests run at once than if each claimed the longest answer
  held      taken or read. Those for the lease are claimed, and count as held already

The pool promises the claimed pages of all requests together: an answer that outgrows its forecast gets a new one and
takes what others have not used yet. Only when nothing of that is left must a younger request give way (`requests.py`),
and until that one is back so many pages are left for it.

Prompts in transfer are different: their pages were promised to a worker that is going to write them, so that part of
the promise is for them alone.
"""

from collections.abc import Callable, Sequence

from decode_worker.request import DecodeRequest
from kv_transfer.lease import LeaseTable
from kv_transfer.lost_pages import LostPages
from tandem.cost_model.answer_length import AnswerLengths
from tandem.engine.cache.prefix_cache import Prefix, PrefixCache
from tandem.protocol.ending import kv_tokens
from tandem.protocol.errors import InvalidArgument, ResourceExhausted, RoleClosed
from tandem.protocol.messages import ModelFacts, Reservation
from tandem.settings.worker import WorkerSettings

RETURN_S = 1.0
"""Seconds for which pages are reserved for a preempted request: enough to return if no other worker has pages."""


class PageReservations:
    """The claims of all requests, and the promise that backs them. Guarded by the admission's lock."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._groups = cache.kv.groups
        self._limit: int | None = None
        self.committed = 0
        """Pages that the requests hold or have claimed."""
        self._reserved = 0
        """Claimed pages: those that the requests may still take from the pool."""
        self._backed = 0
        """The part of them that the pool has promised: all, or fewer where answers have outgrown forecasts."""
        self._lease_pages = 0
        """The part of the promised pages that is for leases: for prompts in transfer."""
        self._held = 0
        """Pages that the requests hold, those for prompts in transfer included."""

    def limit(self, limit: int | None) -> None:
        """Limit the pages that are claimed or held, each counted for every request that reads it.

        With None, as at first, the pool alone is the limit, and shared pages count once. Existing claims stay.
        """
        self._limit = limit

    @property
    def left(self) -> int:
        """The pages that the requests may hold in addition, if the pool has them."""
        return max(0, (self._pool.total if self._limit is None else self._limit) - self._held)

    def reserve(
        self,
        prefix: Prefix,
        pages: int,
        prompt_tokens: int,
        reserved_for_preempted: int,
        *,
        position: int | None = None,
    ) -> int:
        """Claim `pages`, less the cached pages of the prefix, which are read from now on; returns the claimed pages.

        Of the prefix, what tokens from `position` on see is read (`PrefixCache.promise`). At least
        `reserved_for_preempted` pages must be left. ResourceExhausted changes nothing. `await_prompt` follows.
        """
        self._balance()
        short = self._backed < self._reserved
        if short or (self._limit is not None and self.committed + pages + reserved_for_preempted > self._limit):
            raise ResourceExhausted("answers have outgrown their forecasts; come back later")
        claimed = self._cache.promise(prefix, pages, prompt_tokens, aside=reserved_for_preempted, position=position)
        self.committed += pages
        self._reserved += claimed
        self._backed += claimed
        return claimed

    def add_lease(self, lease_pages: int, held: int) -> None:
        """Keep so many of the promised pages for a lease; with them the request holds `held` pages."""
        self._lease_pages += lease_pages
        self._held += held

    def for_chunk(self, request: DecodeRequest, most: int) -> int:
        """Return how many pages a local prompt may take for a chunk, at most `most`.

        Other prompts' pages are backed in any case; the claim of this one may exceed what it was promised at first.
        """
        self._balance()
        return max(0, min(most, request.lease_pages, self._backed - self._lease_pages + request.lease_pages))

    def spend_on_lease(self, request: DecodeRequest, pages: int) -> int:
        """Move so many promised pages to the lease; returns their number."""
        request.reserved_pages -= pages
        request.lease_pages -= pages
        self._reserved -= pages
        self._backed -= pages
        self._lease_pages -= pages
        return pages

    def reserve_again(self, request: DecodeRequest, pages: int, *, for_prompt: bool = False) -> None:
        """Claim as many pages anew as a request with windows has given up: it will take others for later positions.

        `for_prompt` keeps them for its lease.
        """
        request.reserved_pages += pages
        self._reserved += pages
        if for_prompt:
            request.lease_pages += pages
            self._lease_pages += pages
        else:
            request.held -= pages
            self._held -= pages

    def complete_transfer(self, request: DecodeRequest, committed: int) -> None:
        """Commit a request whose KV is here to `committed` pages from now on, if that is less, or to those it holds."""
        left, request.lease_pages = request.lease_pages, 0
        self._lease_pages -= left
        self._held -= left
        request.held -= left
        spare = min(request.reserved_pages, max(0, request.committed - committed))
        request.committed -= spare
        request.reserved_pages -= spare
        self.subtract(spare, spare, 0, 0)

    def extend(self, request: DecodeRequest, pages: int) -> None:
        """Claim `pages` pages in all for a request that outgrew its forecast, whether there are any or not."""
        more = pages - request.committed
        request.committed += more
        request.reserved_pages += more
        self.committed += more
        self._reserved += more

    def grow(self, request: DecodeRequest, *, beyond_limit: bool = False) -> bool:
        """Take one more page of each group for a request with a claim; False if there are none."""
        self._balance()
        if self._limit is not None and self._held + self._groups > self._limit:
            if not beyond_limit:
                return False
            self._backed += self._pool.promise_up_to(self._groups)
        if self._backed - self._groups < self._lease_pages:
            return False
        self._count_growth(request, self._pool.allocate(request.reservation.ref, self._groups, from_promise=True))
        return True

    def grow_all(self, requests: Sequence[DecodeRequest]) -> bool:
        """`grow` for each of the requests, or for none: False if there is not a page for each."""
        self._balance()
        groups = self._groups
        pages = len(requests) * groups
        if self._limit is not None and self._held + pages > self._limit:
            return False
        if self._backed - pages < self._lease_pages:
            return False
        taken = self._pool.allocate_each([request.reservation.ref for request in requests for _ in range(groups)])
        for index, request in enumerate(requests):
            self._count_growth(request, taken[index * groups : (index + 1) * groups])
        return True

    def remove(self, request: DecodeRequest) -> None:
        """Drop the claim of a request that is over; its pages belong to others already."""
        self.subtract(request.committed, request.reserved_pages, request.held, request.lease_pages)

    def _count_growth(self, request: DecodeRequest, pages: Sequence[int]) -> None:
        request.pages += pages
        request.reserved_pages -= len(pages)
        request.held += len(pages)
        self._reserved -= len(pages)
        self._backed -= len(pages)
        self._held += len(pages)

    def subtract(self, committed: int, claimed: int, held: int, lease_pages: int) -> None:
        """Subtract what is over from each count."""
        self.committed -= committed
        self._reserved -= claimed
        self._held -= held
        self._lease_pages -= lease_pages
        self._balance()

    def _balance(self) -> None:
        """Have the pool promise as much of the claims as it can, and no more."""
        missing = self._reserved - self._backed
        if missing < 0:
            self._pool.unpromise(-missing)
            self._backed = self._reserved
        elif missing > 0:
            if self._limit is not None:
                missing = min(missing, self._limit - self._held + self._lease_pages - self._backed)
            self._backed += self._pool.promise_up_to(max(0, missing))


class PageBudget:
    """Pages promised to requests, prompt and answer, until each is over. Guarded by the admission's lock.

    Quarantined pages are lost until their writers confirm or are known to write no more. A worker that has lost a large
    part of its pool reports it and promises nothing until enough of it is back: it would look like a small, full one.
    """

    def __init__(
        self,
        config: WorkerSettings,
        worker_id: str,
        cache: PrefixCache,
        leases: LeaseTable,
        *,
        model: ModelFacts,
        clock: Callable[[], float],
    ) -> None:
        self._lost = LostPages(worker_id, config.kv_quarantine_share)
        self._config = config
        self._worker_id = worker_id
        self._cache = cache
        self._kv = cache.kv
        self._pool = cache.pool
        self._leases = leases
        self._model = model
        self._clock = clock
        self._limit = cache.pool.total
        self._reservations = PageReservations(cache)
        self._lengths = AnswerLengths()
        self._preempted: dict[tuple[str, str], tuple[int, float]] = {}
        """Preempted requests, by router and id: the pages reserved for each, and until when."""
        self._closed = ""

    @property
    def not_ready(self) -> str:
        """The reason why reservations are rejected for now; empty if they are not. `update_lost` updates it."""
        return self._lost.not_ready

    @property
    def committed(self) -> int:
        """Pages of all requests that are not over, promised and held."""
        return self._reservations.committed

    @property
    def left(self) -> int:
        """The pages that the requests may hold in addition, if the pool has them."""
        return self._reservations.left

    def expected_pages(self, reservation: Reservation, tokens: int, *, decoding: bool = True) -> int:
        """Pages that prompt and answer are expected to need, once the answer has so many tokens.

        With `decoding`, the prompt is not computed in them.
        """
        return self._kv.held(self._stored(reservation, self._expected(reservation, tokens)), decoding=decoding)

    def reserve(self, reservation: Reservation, prefix: Prefix, *, local: bool) -> tuple[int, int]:
        """Promise the expected pages, less those of the prefix that are cached, which are read from now on.

        A `local` prompt is computed in these pages.

        Returns how many are expected and how many of them are claimed. ResourceExhausted with a retry hint when there
        are none now, InvalidArgument when the longest answer will never fit, RoleClosed while closed.
        """
        self.update_lost()
        if self._closed:
            raise RoleClosed(f"worker {self._worker_id} takes no answers, as it {self._closed}; ask another one")
        sampling, prompt_tokens = reservation.sampling, len(reservation.prompt_token_ids)
        most = self._kv.held(self._stored(reservation, sampling.max_tokens), decoding=not local)
        if most > self._limit:
            raise InvalidArgument(
                "max_tokens",
                f"prompt and answer need {most} KV pages and worker {self._worker_id} has {self._limit};"
                " ask for fewer tokens",
            )
        if self.not_ready:
            raise self._come_back(f"worker {self._worker_id} promises nothing for now: {self.not_ready}")
        pages = self.expected_pages(reservation, reservation.answered, decoding=not local)
        position = None if local else prompt_tokens
        reserved_for_preempted = self._reserved_for_preempted(reservation, self._limit - pages)
        try:
            reserved = self._reservations.reserve(
                prefix, pages, prompt_tokens, reserved_for_preempted, position=position
            )
        except ResourceExhausted:
            message = f"worker {self._worker_id} has no KV pages left to promise; come back later"
            raise self._come_back(message) from None
        self._preempted.pop((reservation.router_id, reservation.ref.request_id), None)
        return pages, reserved

    def cancel_reservation(self, pages: int, claimed: int) -> None:
        """Give back what `promise` gave for a reservation that becomes no request."""
        self._reservations.subtract(pages, claimed, 0, 0)

    def add_lease(self, request: DecodeRequest) -> None:
        """Keep the promised pages for a new request's lease."""
        self._reservations.add_lease(request.lease_pages, request.held)

    def spend_on_lease(self, request: DecodeRequest, pages: int) -> int:
        """Spend promised pages on the request's lease; returns their number."""
        return self._reservations.spend_on_lease(request, pages)

    def spend_on_chunk(self, request: DecodeRequest, most: int) -> int:
        """Spend promised pages on the lease of a local prompt; returns how many there are, at most `most`."""
        return self._reservations.spend_on_lease(request, self._reservations.for_chunk(request, most))

    def retire_read(self, request: DecodeRequest, position: int) -> None:
        """Release what a local prompt has read and sees no more; it may take as many other pages."""
        retired = self._cache.retire_read(request.prefix, position)
        self._reservations.reserve_again(request, retired, for_prompt=True)

    def complete_transfer(self, request: DecodeRequest) -> None:
        """Keep what a request whose KV is here needs from now on: fewer pages if the prompt was computed in them."""
        if not self._kv.windowed:
            return
        self._retire(request, len(request.reservation.prompt_token_ids))
        pages = self.expected_pages(request.reservation, request.reservation.answered)
        self._reservations.complete_transfer(request, pages)

    def grow(self, request: DecodeRequest, *, beyond_limit: bool = False) -> bool:
        """Take one more page of each group for a running request, and give up those that it sees no more.

        False if there are none, or none within the limit.
        """
        self._retire_unseen(request)
        if request.reserved_pages < self._kv.groups:
            pages = self.expected_pages(request.reservation, len(request.token_ids) + request.in_flight)
            self._reservations.extend(request, max(pages, request.held + self._kv.groups))
        return self._reservations.grow(request, beyond_limit=beyond_limit)

    def grow_all(self, requests: Sequence[DecodeRequest]) -> bool:
        """`grow` for each request; False, and no page is taken, if any of them has no claim or no page."""
        for request in requests:
            self._retire_unseen(request)
        return all(request.reserved_pages >= self._kv.groups for request in requests) and self._reservations.grow_all(
            requests
        )

    def release(self, request: DecodeRequest) -> None:
        """Drop the claim of a request that is over and whose pages belong to others. The caller frees what it reads."""
        self._reservations.remove(request)

    def expect_return(self, request: DecodeRequest) -> None:
        """Reserve pages for a preempted request, for a while. It must be called before `release`."""
        self._preempted[request.key] = request.committed, self._clock() + RETURN_S

    def learn(self, request: DecodeRequest) -> None:
        """Learn the length of an answer that has ended."""
        self._lengths.learn(request.reservation.sampling.max_tokens, len(request.token_ids))

    def close(self, why: str) -> None:
        """Promise nothing until `open` is called."""
        self._closed = why

    def open(self) -> None:
        """Promise pages again."""
        self._closed = ""

    def limit(self, max_pages: int | None) -> None:
        """Limit the promised pages, quarantined ones not counted; None, as at first, means the whole pool.

        Existing promises stay.
        """
        self._limit = self._pool.total if max_pages is None else max_pages
        self._reservations.limit(max_pages)

    def update_lost(self) -> None:
        """Count the pages in quarantine."""
        self._lost.update(self._pool.counts().quarantined, self._limit, self._why)

    def _retire_unseen(self, request: DecodeRequest) -> None:
        """Give up the pages of a request that no step in flight or to come reads."""
        if self._kv.windowed:
            self._retire(request, request.next_unread)

    def _retire(self, request: DecodeRequest, position: int) -> None:
        retired = self._cache.retire(request.reservation.ref, request.prefix, request.pages, position)
        self._reservations.reserve_again(request, retired)

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
        """Positions whose KV is stored once the answer has so many tokens."""
        longest = kv_tokens(reservation.question_tokens, reservation.sampling, self._model)
        shortest = len(reservation.prompt_token_ids)
        return max(shortest, min(longest, reservation.question_tokens + answer - 1))

    def _reserved_for_preempted(self, reservation: Reservation, most: int) -> int:
        """Return the pages, at most `most`, that are reserved for preempted requests, unless this is one of them."""
        now = self._clock()
        self._preempted = {key: entry for key, entry in self._preempted.items() if entry[1] > now}
        if (reservation.router_id, reservation.ref.request_id) in self._preempted:
            return 0
        return min(most, sum(pages for pages, _ in self._preempted.values()))

    def _come_back(self, message: str) -> ResourceExhausted:
        return ResourceExhausted(message, retry_after_s=self._config.lease_retry_after_s)
