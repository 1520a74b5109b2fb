"""The requests of the decode phase, from their reservation to their end.

Each request has reserved pages and, once its KV has arrived, owns pages.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence

from decode_worker import preemption
from decode_worker.page_budget import PageBudget
from decode_worker.request import DecodeRequest, Stage
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.protocol.ending import failure_event
from tandem.protocol.errors import TandemError, TransferFailed
from tandem.protocol.kv_pages import FREED
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.messages import Lease, RequestEvent, RequestRef, RoutedEvent, TransferNotice

ADMITTED_REMEMBERED = 4096
"""Number of leases that `has_arrived` remembers: those whose KV arrived last.

A heartbeat may name a lease whose notice arrived shortly before; that lease must not be reported as lost.
"""


class DecodeRequests:
    """All requests that have not ended, and the queue of ready ones.

    Guarded by the admission's lock, which the decode scheduler takes too. Owned by the admission.
    """

    def __init__(self, cache: PrefixCache, budget: PageBudget, emit: Callable[[RoutedEvent], None]) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._budget = budget
        self._emit = emit
        self._by_key: dict[tuple[str, str], DecodeRequest] = {}
        self.ready: deque[DecodeRequest] = deque()
        """Requests whose KV has arrived and is correct, and that wait to join the running batch, oldest first."""
        self._arrived: OrderedDict[int, None] = OrderedDict()
        self.preemptions = 0
        """The number of preemptions since the worker started."""
        self._dropped: set[DecodeRequest] = set()
        """Cancelled requests whose pages are still in use."""
        self.cancelled = 0
        """The number of requests that were cancelled while their pages were in use, since the worker started."""

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._by_key)

    def find(self, router_id: str, request_id: str) -> DecodeRequest | None:
        """Return the latest attempt of a request, or None if it is unknown or has ended."""
        return self._by_key.get((router_id, request_id))

    def refs(self) -> list[tuple[str, RequestRef]]:
        """Return every request that has not ended, as pairs of router id and request reference."""
        return [(router_id, request.reservation.ref) for (router_id, _), request in self._by_key.items()]

    def adapters(self) -> set[str]:
        """Return the adapter hashes of all requests that may still be in a step; "" stands for the base model."""
        return {request.reservation.adapter for request in (*self._by_key.values(), *self._dropped)}

    def add(self, request: DecodeRequest) -> None:
        """Add a request whose stage is Stage.LEASED."""
        self._by_key[request.key] = request

    def adopt(
        self, request: DecodeRequest, check_until: float, pages: Sequence[int] = (), states: Collection[int] = ()
    ) -> None:
        """Transfer the pages of the request's lease to the request. All writes to them must have ended.

        The KV in the pages is not checked yet; the check must have a result before `check_until`. For a local prompt,
        `pages` are its pages, listed as by `KvPages`, and `states` the numbers of the state pages that others may
        reuse; otherwise both are empty, and the pages are those of the lease in their order.
        """
        tokens, page_tokens = len(request.reservation.prompt_token_ids), self._cache.page_tokens
        request.prefix.states.update(states if pages or tokens % page_tokens else [tokens // page_tokens - 1])
        request.check_until = check_until
        adopted = self._pool.adopt(request.lease, request.reservation.ref)
        request.pages = list(pages) if pages else self._listed(request, adopted)
        request.stage = Stage.CHECKING
        self._arrived[request.lease.epoch] = None
        if len(self._arrived) > ADMITTED_REMEMBERED:
            self._arrived.popitem(last=False)

    def has_arrived(self, lease: Lease) -> bool:
        """Return True if the KV of this lease has arrived; only the last ADMITTED_REMEMBERED leases are known."""
        return lease.epoch in self._arrived

    def admit(self, request: DecodeRequest, notice: TransferNotice) -> None:
        """Make a request ready after its KV was found correct.

        From now on, other requests may read the full pages of its prompt.
        """
        self._cache.publish(request.reservation.ref, request.prefix, request.pages)
        self._budget.complete_transfer(request)
        answer = request.reservation.answer
        request.answer = [*answer, notice.first_token_id]
        request.first_draw = notice.next_draw - len(answer)
        request.event_times.append(EventTime.now(LifecycleEvent.DECODE_ADMITTED))
        request.stage = Stage.READY
        self.ready.append(request)

    def join(self, most: int) -> list[DecodeRequest]:
        """Take at most `most` ready requests out of the queue, oldest first, and mark them as running."""
        joining = [self.ready.popleft() for _ in range(min(most, len(self.ready)))]
        for request in joining:
            request.stage = Stage.RUNNING
        return joining

    def grow_all(self, requests: Sequence[DecodeRequest]) -> bool:
        """Allocate one more page of each group to each of these running requests.

        Returns False, and allocates nothing, if the free pages do not suffice; no request is preempted.
        """
        return self._budget.grow_all(requests)

    def grow(self, request: DecodeRequest, running: Collection[DecodeRequest]) -> bool:
        """Allocate one more page of each group to a running request, by preempting a request if necessary.

        Ready requests and those in `running`, `request` included, may be preempted. Returns False if there is no page
        yet; the request then waits for the next step.
        """
        while not self._budget.grow(request):
            staying = [candidate for candidate in running if candidate.stage is Stage.RUNNING]
            # A request that leaves will free its pages soon: waiting for them is cheaper than a preemption.
            if any(candidate.leaving for candidate in staying):
                return False
            victim = preemption.choose(request, [*self.ready, *staying])
            if victim is None:
                # The only request continues even if the page limit was lowered since it arrived.
                alone = len(self.ready) + len(staying) == 1
                return alone and self._budget.grow(request, beyond_limit=True)
            # A step in flight may write to the victim's pages, so it leaves only when that step has completed.
            if victim.in_flight:
                victim.preempting = True
                return False
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, request: DecodeRequest) -> None:
        """Preempt a ready or running request.

        Its router sends it again, with its tokens so far, and its KV is recomputed.
        """
        if request.stage is Stage.READY:
            self.ready.remove(request)
        self.preemptions += 1
        reservation = request.reservation
        event_times = (*request.event_times, EventTime.now(LifecycleEvent.PREEMPTED))
        event = RequestEvent(reservation.ref, len(request.token_ids), event_times=event_times, preempted=True)
        # Called before `_leave`, which drops the reservation, because the same number of pages is then kept free.
        self._budget.reserve_for_preempted(request)
        self._leave(request)
        self._emit(RoutedEvent(reservation.router_id, event))

    def end_late_checks(self, now: float) -> bool:
        """Fail the requests whose KV check has exceeded its deadline; return True if there were any.

        Their pages are freed once the check has its result, because it still reads them.
        """
        late = [one for one in self._by_key.values() if one.stage is Stage.CHECKING and now > one.check_until]
        for request in late:
            self.cancel(request)
            self._emit_failure(request, TransferFailed("what arrived could not be checked in time; prefill again"))
        return bool(late)

    def cancel(self, request: DecodeRequest) -> None:
        """Cancel a request whose KV has arrived. Its pages are freed once no step or check uses them."""
        if request.stage is Stage.READY:
            self.ready.remove(request)
            self.free(request)
        else:
            # A step or a check may be reading the request's pages: the batch frees the request at the end of the step,
            # or the check frees it when it has its result.
            request.cancelled = True
            self.cancelled += 1
            self._dropped.add(request)
            self._by_key.pop(request.key, None)

    def leave(self, request: DecodeRequest) -> None:
        """End a running request. Unless it failed, the forecast of answer lengths learns from its answer."""
        if request.failed:
            self.free(request)
        else:
            self._budget.learn(request)
            self._leave(request)

    def _leave(self, request: DecodeRequest) -> None:
        """Add the pages that the answer fills to the prefix cache, and free the request."""
        named = len(request.prefix.digests) * self._cache.page_tokens
        self._cache.extend(request.prefix, request.stored_from(named))
        self._cache.publish(request.reservation.ref, request.prefix, request.pages)
        self.free(request)

    def free(self, request: DecodeRequest, failure: TandemError | None = None) -> None:
        """Free the pages of a request and end it. No step may use the pages. `failure` is sent to its router."""
        self._cache.leave(request.reservation.ref, request.prefix, request.pages)
        self.end(request, failure)

    def end(self, request: DecodeRequest, failure: TandemError | None = None) -> None:
        """End a request: drop its reservation and release the cached pages that it reads.

        The request must no longer own pages. `failure`, if given, is sent to its router.
        """
        self._cache.release(request.prefix)
        self._budget.release(request)
        request.reserved_pages, request.pages, request.stage = 0, [], Stage.OVER
        self._dropped.discard(request)
        if self._by_key.get(request.key) is request:
            del self._by_key[request.key]
        if failure is not None:
            self._emit_failure(request, failure)

    def _listed(self, request: DecodeRequest, sent: Sequence[int]) -> list[int]:
        """Return one list of the request's cached pages and the pages `sent` to it, in the order of `KvPages`."""
        kv, read = self._cache.kv, request.prefix.pages
        pages = [*read, *[FREED] * (request.prompt_pages * kv.groups - len(read))]
        entries = kv.sent(len(request.reservation.prompt_token_ids), request.skipped)
        for entry, page in zip(entries, sent, strict=True):
            pages[entry] = page
        return pages

    def _emit_failure(self, request: DecodeRequest, failure: TandemError) -> None:
        reservation = request.reservation
        self._emit(RoutedEvent(reservation.router_id, failure_event(reservation.ref, failure)))
