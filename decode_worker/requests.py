"""The requests of the decode half: each has a promise of pages and, once its KV has arrived, pages of its own."""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence

from decode_worker import preemption
from decode_worker.page_budget import PageBudget
from decode_worker.request import DecodeRequest, Stage
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.protocol.ending import failure_event
from tandem.protocol.errors import TandemError, TransferFailed
from tandem.protocol.kv_pages import FREED
from tandem.protocol.lifecycle.timeline import Edge, EdgeStamp
from tandem.protocol.messages import Lease, RequestEvent, RequestRef, RoutedEvent, TransferNotice

ADMITTED_REMEMBERED = 4096
"""The number of epochs of leases whose KV has arrived that are remembered.

A lease whose notice arrived while a heartbeat for it was on its way must not be reported as lost.
"""


class DecodeRequests:
    """All requests from their reservation to their end. Guarded by the admission's lock."""

    def __init__(self, cache: PrefixCache, budget: PageBudget, emit: Callable[[RoutedEvent], None]) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._budget = budget
        self._emit = emit
        self._by_key: dict[tuple[str, str], DecodeRequest] = {}
        self.ready: deque[DecodeRequest] = deque()
        """Requests that wait for the running batch, oldest first."""
        self._arrived: OrderedDict[int, None] = OrderedDict()
        self.preemptions = 0
        """The number of preempted requests."""
        self._dropped: set[DecodeRequest] = set()
        """Cancelled requests whose pages are in use."""
        self.cancelled = 0
        """The number of requests that were cancelled while their pages were in use."""

    def __len__(self) -> int:
        """Requests that are not over."""
        return len(self._by_key)

    def find(self, router_id: str, request_id: str) -> DecodeRequest | None:
        """The latest attempt at a request, unless it is over."""
        return self._by_key.get((router_id, request_id))

    def refs(self) -> list[tuple[str, RequestRef]]:
        """Every request that is not over, with its router."""
        return [(router_id, request.reservation.ref) for (router_id, _), request in self._by_key.items()]

    def adapters(self) -> set[str]:
        """The hashes of the adapters of all requests that a step may still compute; "" = the base model."""
        return {request.reservation.adapter for request in (*self._by_key.values(), *self._dropped)}

    def add(self, request: DecodeRequest) -> None:
        """A request in Stage.LEASED."""
        self._by_key[request.key] = request

    def adopt(self, request: DecodeRequest, check_until: float, pages: Sequence[int] = ()) -> None:
        """Make the request the owner of its lease's pages, which no write reaches any more; they are not checked yet.

        `pages` are those of a local prompt as `KvPages` lists them; without them, the lease's pages are in order.
        """
        request.check_until = check_until
        adopted = self._pool.adopt(request.lease, request.reservation.ref)
        request.pages = list(pages) if pages else self._listed(request, adopted)
        request.stage = Stage.CHECKING
        self._arrived[request.lease.epoch] = None
        if len(self._arrived) > ADMITTED_REMEMBERED:
            self._arrived.popitem(last=False)

    def has_arrived(self, lease: Lease) -> bool:
        """Return True if the KV of this lease has come, not too long ago."""
        return lease.epoch in self._arrived

    def admit(self, request: DecodeRequest, notice: TransferNotice) -> None:
        """Make a request ready, as its KV is right; others may read its prompt's full pages."""
        self._cache.publish(request.reservation.ref, request.prefix, request.pages)
        self._budget.complete_transfer(request)
        answer = request.reservation.answer
        request.answer = [*answer, notice.first_token_id]
        request.first_draw = notice.next_draw - len(answer)
        request.edges.append(EdgeStamp.now(Edge.DECODE_ADMITTED))
        request.stage = Stage.READY
        self.ready.append(request)

    def join(self, most: int) -> list[DecodeRequest]:
        """Start at most `most` ready requests, oldest first."""
        joining = [self.ready.popleft() for _ in range(min(most, len(self.ready)))]
        for request in joining:
            request.stage = Stage.RUNNING
        return joining

    def grow_all(self, requests: Sequence[DecodeRequest]) -> bool:
        """Allocate one more page to each of these running requests, if that preempts none, or to none."""
        return self._budget.grow_all(requests)

    def grow(self, request: DecodeRequest, running: Collection[DecodeRequest]) -> bool:
        """Allocate one more page to a running request, if need be by preemption of it or another one.

        A ready or `running` request may be preempted. Returns False if there is no page yet: the request waits for the
        next step.
        """
        while not self._budget.grow(request):
            staying = [each for each in running if each.stage is Stage.RUNNING]
            if any(each.leaving for each in staying):
                return False
            victim = preemption.choose(request, [*self.ready, *staying])
            if victim is None:
                # Alone it goes on, even if the limit is lower now than when it came.
                alone = len(self.ready) + len(staying) == 1
                return alone and self._budget.grow(request, beyond_limit=True)
            if victim.in_flight:
                victim.preempting = True
                return False
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, request: DecodeRequest) -> None:
        """Preempt a ready or running request; its router has it recomputed behind the tokens that are here."""
        if request.stage is Stage.READY:
            self.ready.remove(request)
        self.preemptions += 1
        reservation = request.reservation
        edges = (*request.edges, EdgeStamp.now(Edge.PREEMPTED))
        event = RequestEvent(reservation.ref, len(request.token_ids), edges=edges, preempted=True)
        self._budget.expect_return(request)
        self._leave(request)
        self._emit(RoutedEvent(reservation.router_id, event))

    def end_late_checks(self, now: float) -> bool:
        """Requests whose check takes too long fail; their pages are free once it has its result.

        Whether there were any.
        """
        late = [one for one in self._by_key.values() if one.stage is Stage.CHECKING and now > one.check_until]
        for request in late:
            self.cancel(request)
            self._emit_failure(request, TransferFailed("what arrived could not be checked in time; prefill again"))
        return bool(late)

    def cancel(self, request: DecodeRequest) -> None:
        """Cancel a request whose KV has arrived."""
        if request.stage is Stage.READY:
            self.ready.remove(request)
            self.free(request)
        else:
            # Its pages may be read now: the batch drops it at the step's end, the check when it has its result.
            request.cancelled = True
            self.cancelled += 1
            self._dropped.add(request)
            self._by_key.pop(request.key, None)

    def leave(self, request: DecodeRequest) -> None:
        """End a running request, and its answer with it."""
        if request.failed:
            self.free(request)
        else:
            self._budget.learn(request)
            self._leave(request)

    def _leave(self, request: DecodeRequest) -> None:
        """Let others read the pages that its answer fills."""
        named = len(request.prefix.digests) * self._cache.page_tokens
        self._cache.extend(request.prefix, request.stored_from(named))
        self._cache.publish(request.reservation.ref, request.prefix, request.pages)
        self.free(request)

    def free(self, request: DecodeRequest, failure: TandemError | None = None) -> None:
        """Free the pages of a request, which are read no more, and end it."""
        self._cache.leave(request.reservation.ref, request.prefix, request.pages)
        self.end(request, failure)

    def end(self, request: DecodeRequest, failure: TandemError | None = None) -> None:
        """End a request: give back the rest of its promise and read nothing any more.

        Its own pages, if any, have another owner by now. Its router is told of a failure.
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
        """Return the pages that a request reads and those that were sent to it, as `KvPages` lists them."""
        kv, read = self._cache.kv, request.prefix.pages
        pages = [*read, *[FREED] * (request.prompt_pages * kv.groups - len(read))]
        entries = kv.sent(len(request.reservation.prompt_token_ids), request.skipped)
        for entry, page in zip(entries, sent, strict=True):
            pages[entry] = page
        return pages

    def _emit_failure(self, request: DecodeRequest, failure: TandemError) -> None:
        reservation = request.reservation
        self._emit(RoutedEvent(reservation.router_id, failure_event(reservation.ref, failure)))
