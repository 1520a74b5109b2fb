"""The page budget of the decode phase: the KV pages that each request reserves, and how many of them the pool backs.

The pages of a request are of two kinds, in the decode phase as in the prefill phase:

  reserved  pages that the request may still take from the pool. The number follows from the expected length of prompt
            and answer (`tandem/cost_model/answer_length.py`), so more requests run concurrently than if each one
            reserved pages for its maximum answer length
  held      pages that the request owns or reads. Reserved pages that are meant for its lease count as held already

The pool backs the reserved pages: it keeps as many pages free as all requests have reserved. If an answer exceeds its
forecast, the request gets a longer forecast, and takes backed pages that other requests have not used yet. A younger
request is preempted only when no backed page is left (`requests.py`). As many pages as that request had committed are
then kept free until it returns, but for at most RETURN_S seconds.

Backed pages that are kept for a lease are an exception: no other request may take them, because a prefill worker will
write to them.
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
"""Seconds for which pages are kept free for a preempted request, so that it can return if no other worker has pages."""


class PageReservations:
    """Counts the reserved pages of all requests, and the pages that the pool keeps to back them.

    Owned by `PageBudget`; guarded by the admission's lock.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._groups = cache.kv.groups
        self._limit: int | None = None
        self.committed = 0
        """The number of pages that the requests hold or have reserved."""
        self._reserved = 0
        """The number of reserved pages, which the requests may still take from the pool."""
        self._backed = 0
        """The number of reserved pages that the pool backs with free pages.

        All of the reserved pages, or fewer if answers have exceeded their forecasts.
        """
        self._lease_pages = 0
        """The number of backed pages that are kept for leases, and therefore for prompts in transfer."""
        self._held = 0
        """The number of pages that the requests hold, including those for prompts in transfer."""

    def limit(self, limit: int | None) -> None:
        """Limit the sum of reserved and held pages of all requests.

        With a limit, a shared page counts once for every request that reads it. With None, the initial value, only the
        size of the pool limits the pages, and shared pages count once. Existing reservations stay.
        """
        self._limit = limit

    @property
    def used_share(self) -> float:
        """The share of the limit that requests hold or have reserved; 0 without a limit."""
        return self.committed / self._limit if self._limit else 0.0

    @property
    def left(self) -> int:
        """The number of additional pages that the requests may hold, provided that the pool has them."""
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
        """Reserve `pages` pages, less the cached pages that the request reads, and return the number of reserved pages.

        The request reads the cached pages of `prefix` from now on; in groups with a sliding window, only those in the
        windows of the tokens from `position` on (None = from the end of the cached pages). At least
        `reserved_for_preempted` pages must stay free. Raises ResourceExhausted, and changes nothing, if there are too
        few pages. The caller calls `add_lease` next.
        """
        self.check_limit(pages + reserved_for_preempted)
        reserved = self._cache.reserve(prefix, pages, prompt_tokens, aside=reserved_for_preempted, position=position)
        self.committed += pages
        self._reserved += reserved
        self._backed += reserved
        return reserved

    def check_limit(self, pages: int) -> None:
        """Raise ResourceExhausted if `pages` more pages would exceed the limit, whether or not the pool has them."""
        self._balance()
        # While some reserved pages have no free page, a new request would compete with the running ones.
        short = self._backed < self._reserved
        if short or (self._limit is not None and self.committed + pages > self._limit):
            raise ResourceExhausted("answers have outgrown their forecasts; come back later")

    def add_lease(self, lease_pages: int, held: int) -> None:
        """Keep `lease_pages` of the backed pages for a new lease.

        `held` is the number of pages that the lease's request holds, including `lease_pages`.
        """
        self._lease_pages += lease_pages
        self._held += held

    def for_chunk(self, request: DecodeRequest, most: int) -> int:
        """Return the number of pages that a local prompt may take for its next chunk; at most `most`.

        Backed pages that are kept for leases of other prompts are not available. The result may be less than this
        prompt has reserved: in place of pages that left its sliding window it has reserved others, which may not be
        backed yet.
        """
        self._balance()
        # All backed pages except those that are kept for the leases of other prompts.
        return max(0, min(most, request.lease_pages, self._backed - self._lease_pages + request.lease_pages))

    def spend_on_lease(self, request: DecodeRequest, pages: int) -> int:
        """Move `pages` backed pages from the request's reservation to its lease, and return `pages`."""
        request.reserved_pages -= pages
        request.lease_pages -= pages
        self._reserved -= pages
        self._backed -= pages
        self._lease_pages -= pages
        return pages

    def reserve_again(self, request: DecodeRequest, pages: int, *, for_prompt: bool = False) -> None:
        """Reserve `pages` pages after a request has released as many that left its sliding window.

        The request will take other pages for later positions. With `for_prompt`, the pages are kept for its lease.
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
        """Lower the number of committed pages of a request, whose KV has arrived, to at most `committed`.

        Only reserved pages are given up: pages that the request holds stay committed. Pages that are still kept for the
        lease no longer count as held.
        """
        left, request.lease_pages = request.lease_pages, 0
        self._lease_pages -= left
        self._held -= left
        request.held -= left
        spare = min(request.reserved_pages, max(0, request.committed - committed))
        request.committed -= spare
        request.reserved_pages -= spare
        self.subtract(spare, spare, 0, 0)

    def extend(self, request: DecodeRequest, pages: int) -> None:
        """Raise the committed pages of a request that has exceeded its forecast to `pages`.

        The pool may have too few pages to back them.
        """
        more = pages - request.committed
        request.committed += more
        request.reserved_pages += more
        self.committed += more
        self._reserved += more

    def grow(self, request: DecodeRequest, *, beyond_limit: bool = False) -> bool:
        """Take one more page of each group for a request with a reservation; return False if there are too few.

        With `beyond_limit`, the page limit is ignored for this request.
        """
        self._balance()
        if self._limit is not None and self._held + self._groups > self._limit:
            if not beyond_limit:
                return False
            self._backed += self._pool.reserve_up_to(self._groups)
        # Backed pages that are kept for leases must not be used, because prefill workers will write them.
        if self._backed - self._groups < self._lease_pages:
            return False
        self._count_growth(request, self._pool.allocate(request.reservation.ref, self._groups, from_reserved=True))
        return True

    def grow_all(self, requests: Sequence[DecodeRequest]) -> bool:
        """Take one more page of each group for each of the requests.

        Returns False, and takes no page, if there are too few for all of them.
        """
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
        """Drop the reservation of a request that has ended. The request no longer owns its pages."""
        self.subtract(request.committed, request.reserved_pages, request.held, request.lease_pages)

    def _count_growth(self, request: DecodeRequest, pages: Sequence[int]) -> None:
        request.pages += pages
        request.reserved_pages -= len(pages)
        request.held += len(pages)
        self._reserved -= len(pages)
        self._backed -= len(pages)
        self._held += len(pages)

    def subtract(self, committed: int, reserved: int, held: int, lease_pages: int) -> None:
        """Subtract the pages of a request that has ended, or the reduction of a reservation, from the counts."""
        self.committed -= committed
        self._reserved -= reserved
        self._held -= held
        self._lease_pages -= lease_pages
        self._balance()

    def _balance(self) -> None:
        """Make the number of backed pages equal to that of reserved pages, as far as the pool and the limit allow."""
        missing = self._reserved - self._backed
        if missing < 0:
            self._pool.unreserve(-missing)
            self._backed = self._reserved
        elif missing > 0:
            if self._limit is not None:
                # Pages that are kept for leases count as held and as backed; the limit counts them once.
                missing = min(missing, self._limit - self._held + self._lease_pages - self._backed)
            self._backed += self._pool.reserve_up_to(max(0, missing))


class PageBudget:
    """The pages that requests reserve for prompt and answer until they end. Guarded by the admission's lock.

    Quarantined pages are lost until their writers confirm that they have stopped, or are known to have stopped. A
    worker that has lost a large part of its pool reports that it is not ready, and accepts no reservation until enough
    pages are back. Otherwise it would look to the routers like a small worker that is full. Owned by the admission.
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
        """The number of pages kept for each preempted request, and until when, by router and request id."""
        self._closed = ""

    @property
    def not_ready(self) -> str:
        """The reason why reservations are rejected now; empty if they are accepted. Computed by `update_lost`."""
        return self._lost.not_ready

    @property
    def committed(self) -> int:
        """The number of pages that requests hold or have reserved, over all requests that have not ended."""
        return self._reservations.committed

    @property
    def left(self) -> int:
        """The number of additional pages that the requests may hold, provided that the pool has them."""
        return self._reservations.left

    @property
    def used_share(self) -> float:
        """The share of the limit that requests hold or have reserved; 0 if only the pool limits them."""
        return self._reservations.used_share

    def expected_pages(self, reservation: Reservation, tokens: int, *, decoding: bool = True) -> int:
        """Return the number of pages that the request is expected to need for an answer of `tokens` tokens.

        With `decoding`, the prompt is not computed in these pages, so groups with a sliding window need fewer of them.
        """
        return self._kv.held(self._stored(reservation, self._expected(reservation, tokens)), decoding=decoding)

    def reserve(self, reservation: Reservation, prefix: Prefix, *, local: bool) -> tuple[int, int]:
        """Reserve the expected pages of a request, and return the numbers of expected pages and of reserved pages.

        The request reads the cached pages of `prefix` from now on; no pages are reserved for them. `local`: this worker
        computes the prompt, in these pages. Raises ResourceExhausted with a retry hint if there are too few pages now,
        InvalidArgument if the longest answer can never fit, RoleClosed while closed.
        """
        pages, reserved_for_preempted = self.check_accepts(reservation, local=local)
        position = None if local else len(reservation.prompt_token_ids)
        try:
            reserved = self._reservations.reserve(
                prefix, pages, len(reservation.prompt_token_ids), reserved_for_preempted, position=position
            )
        except ResourceExhausted:
            raise self._no_pages() from None
        self._preempted.pop((reservation.router_id, reservation.ref.request_id), None)
        return pages, reserved

    def check_accepts(self, reservation: Reservation, *, local: bool) -> tuple[int, int]:
        """Return the numbers of expected pages, and of pages that must stay free for preempted requests.

        Raises the errors of `reserve`, except that the pool may still have too few pages: that depends on its prefix.
        """
        self.update_lost()
        if self._closed:
            raise RoleClosed(f"worker {self._worker_id} takes no answers, as it {self._closed}; ask another one")
        most = self._kv.held(self._stored(reservation, reservation.sampling.max_tokens), decoding=not local)
        # The longest answer must fit alone: the oldest request, which is never preempted, may grow that far.
        if most > self._limit:
            raise InvalidArgument(
                "max_tokens",
                f"prompt and answer need {most} KV pages and worker {self._worker_id} has {self._limit};"
                " ask for fewer tokens",
            )
        if self.not_ready:
            raise self._come_back(f"worker {self._worker_id} promises nothing for now: {self.not_ready}")
        pages = self.expected_pages(reservation, reservation.prior_output_tokens, decoding=not local)
        reserved_for_preempted = self._reserved_for_preempted(reservation, self._limit - pages)
        try:
            self._reservations.check_limit(pages + reserved_for_preempted)
        except ResourceExhausted:
            raise self._no_pages() from None
        return pages, reserved_for_preempted

    def _no_pages(self) -> ResourceExhausted:
        return self._come_back(f"worker {self._worker_id} has no KV pages left to promise; come back later")

    def cancel_reservation(self, pages: int, reserved: int) -> None:
        """Undo `reserve` for a reservation that was not granted; the arguments are the result of `reserve`."""
        self._reservations.subtract(pages, reserved, 0, 0)

    def add_lease(self, request: DecodeRequest) -> None:
        """Keep part of the reserved pages for the lease of a new request."""
        self._reservations.add_lease(request.lease_pages, request.held)

    def spend_on_lease(self, request: DecodeRequest, pages: int) -> int:
        """Move `pages` pages from the request's reservation to its lease, and return `pages`."""
        return self._reservations.spend_on_lease(request, pages)

    def spend_on_chunk(self, request: DecodeRequest, most: int) -> int:
        """Take at most `most` reserved pages for the next chunk of a local prompt, and return the number taken."""
        return self._reservations.spend_on_lease(request, self._reservations.for_chunk(request, most))

    def retire_read(self, request: DecodeRequest, position: int) -> None:
        """Release the cached pages of a local prompt that have left the sliding window, and reserve as many others."""
        retired = self._cache.retire_read(request.prefix, position)
        self._reservations.reserve_again(request, retired, for_prompt=True)

    def complete_transfer(self, request: DecodeRequest) -> None:
        """Reduce the pages of a request, whose KV has arrived, to those that decoding needs.

        This applies to models with sliding windows: there, a prompt that is computed in these pages needs more pages
        than decoding.
        """
        if not self._kv.windowed:
            return
        self._retire(request, len(request.reservation.prompt_token_ids))
        pages = self.expected_pages(request.reservation, request.reservation.prior_output_tokens)
        self._reservations.complete_transfer(request, pages)

    def grow(self, request: DecodeRequest, *, beyond_limit: bool = False) -> bool:
        """Take one more page of each group for a running request, and release pages outside its sliding window.

        Returns False if the pool or the page limit has no such page left. `beyond_limit` ignores the limit.
        """
        self._retire_unseen(request)
        # The answer has exceeded its forecast: reserve pages for a longer forecast.
        if request.reserved_pages < self._kv.groups:
            pages = self.expected_pages(request.reservation, len(request.token_ids) + request.in_flight)
            self._reservations.extend(request, max(pages, request.held + self._kv.groups))
        return self._reservations.grow(request, beyond_limit=beyond_limit)

    def grow_all(self, requests: Sequence[DecodeRequest]) -> bool:
        """Take one more page of each group for each of the requests.

        Returns False, and takes no page, if any of the requests has too few reserved pages or the pool has too few
        pages.
        """
        for request in requests:
            self._retire_unseen(request)
        return all(request.reserved_pages >= self._kv.groups for request in requests) and self._reservations.grow_all(
            requests
        )

    def release(self, request: DecodeRequest) -> None:
        """Drop the reservation of a request that has ended. The request no longer owns its pages.

        The caller releases the cached pages that the request reads.
        """
        self._reservations.remove(request)

    def reserve_for_preempted(self, request: DecodeRequest) -> None:
        """Keep pages for a preempted request for RETURN_S seconds. Must be called before `release`."""
        self._preempted[request.key] = request.committed, self._clock() + RETURN_S

    def learn(self, request: DecodeRequest) -> None:
        """Update the forecast of answer lengths with the length of an answer that has ended."""
        self._lengths.learn(request.reservation.sampling.max_tokens, len(request.token_ids))

    def close(self, why: str) -> None:
        """Reject reservations until `open` is called; `why` becomes part of the error message."""
        self._closed = why

    def open(self) -> None:
        """Accept reservations again."""
        self._closed = ""

    def limit(self, max_pages: int | None) -> None:
        """Limit the pages that requests hold or reserve; quarantined pages do not count.

        None, the initial value, means the whole pool. Existing reservations stay.
        """
        self._limit = self._pool.total if max_pages is None else max_pages
        self._reservations.limit(max_pages)

    def update_lost(self) -> None:
        """Update `not_ready` from the number of pages in quarantine."""
        self._lost.update(self._pool.counts().quarantined, self._limit, self._why)

    def _retire_unseen(self, request: DecodeRequest) -> None:
        """Release the request's pages that have left its sliding window: no step in flight or later step reads them."""
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
        """Return the number of positions that have stored KV once the answer has `answer` tokens."""
        longest = kv_tokens(reservation.original_prompt_tokens, reservation.sampling, self._model)
        shortest = len(reservation.prompt_token_ids)
        return max(shortest, min(longest, reservation.original_prompt_tokens + answer - 1))

    def _reserved_for_preempted(self, reservation: Reservation, most: int) -> int:
        """Return the number of pages, at most `most`, that a new reservation must leave free for preempted requests.

        Returns 0 if this reservation is for a preempted request that returns.
        """
        now = self._clock()
        self._preempted = {key: entry for key, entry in self._preempted.items() if entry[1] > now}
        if (reservation.router_id, reservation.ref.request_id) in self._preempted:
            return 0
        return min(most, sum(pages for pages, _ in self._preempted.values()))

    def _come_back(self, message: str) -> ResourceExhausted:
        return ResourceExhausted(message, retry_after_s=self._config.lease_retry_after_s)
