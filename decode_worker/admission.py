"""Who may come into the decode half: reservations, leases, and what arrives under them.

The path of a request, by its queues (`decode_worker/request.py`):
  1. `reserve`  promises pages for prompt and answer, so that nothing that runs is ever preempted; `allot` turns the
                prompt's share into pages that one prefill worker may write
  2. `notice`   the KV has arrived: checked against the reservation, the pages change owner, the request is ready
  3. `join`     the running batch takes it; `leave` ends it
Anything else that can happen to it (abort, expiry, a dead prefill worker, a released lease) goes through the lease
table, which says what to do with the pages.

Every method answers at once, from any thread, under one lock.
"""

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from decode_worker.config import DecodeConfig
from decode_worker.request import DecodeRequest, Stage
from engine.cache.page_pool import PagePool
from kv_transfer.lease import LeaseChange, LeaseTable, PageAction
from wire.ending import kv_tokens, pages_for, reason_to_end
from wire.errors import InvalidArgument, ResourceExhausted, StaleEpoch, TandemError, TransferFailed, Unavailable
from wire.messages import (
    ErrorDetail,
    FinishReason,
    GrantedLease,
    Lease,
    ModelFacts,
    PeerRef,
    RequestEvent,
    RequestRef,
    Reservation,
    RoutedEvent,
    TransferNotice,
    hash_token_ids,
)
from wire.timeline import Edge, EdgeStamp

log = logging.getLogger(__name__)

ADMITTED_REMEMBERED = 4096
"""Epochs of admitted leases remembered, so that a heartbeat that crosses a notice does not read as a loss."""


class DecodeAdmission:
    """Owns every reservation of this worker until it leaves, its pages and what is left of its promise."""

    def __init__(
        self,
        *,
        config: DecodeConfig,
        me: PeerRef,
        pool: PagePool,
        page_tokens: int,
        model: ModelFacts,
        clock: Callable[[], float],
        expect: Callable[[int], None],
        emit: Callable[[RoutedEvent], None],
        wake: Callable[[], None],
    ) -> None:
        """`expect` hears how many leases may see a notice, `emit` what a router must know, `wake` that work is ready.

        All three are called from any thread and return at once; `expect` under the lock, so that the last count it
        hears is the true one.
        """
        self._config = config
        self._me = me
        self._pool = pool
        self._page_tokens = page_tokens
        self._model = model
        self._expect = expect
        self._emit = emit
        self._wake = wake
        self._leases: LeaseTable = LeaseTable(clock, config.lease_s, config.quarantine_s)
        self._lock = threading.Lock()
        # By epoch: exactly the requests whose lease the table holds and has not revoked; both change under one lock.
        self._leased: dict[int, DecodeRequest] = {}
        self._requests: dict[tuple[str, str], DecodeRequest] = {}
        self._ready: deque[DecodeRequest] = deque()
        self._admitted: OrderedDict[int, None] = OrderedDict()
        self._pages_limit = pool.counts().total if config.max_pages is None else config.max_pages
        self._pages_committed = 0
        self._draining = False
        self._mismatches = 0

    # ---- routers ----

    def reserve(self, reservation: Reservation) -> GrantedLease:
        """Promise pages to a validated reservation. The same one twice gets the same lease.

        ResourceExhausted with a retry hint when there is no room now, InvalidArgument when there never will be,
        StaleEpoch when this attempt is another reservation's or over, Unavailable while draining or when the prefill
        worker is gone.
        """
        prompt_tokens = len(reservation.prompt_token_ids) - reservation.answered
        tokens = kv_tokens(prompt_tokens, reservation.sampling, self._model)
        pages = pages_for(tokens, self._page_tokens)
        with self._lock:
            try:
                request = self._known(reservation) or self._grant(reservation, pages)
            finally:
                self._expect(self._leases.open_leases)
        return GrantedLease(request.lease, self._config.lease_s)

    def heartbeat(self, leases: Iterable[Lease]) -> tuple[Lease, ...]:
        """Keep these leases alive; returns those that are lost. One that has become a request is not lost."""
        unknown = self._leases.renew(leases)
        with self._lock:
            return tuple(lease for lease in unknown if lease.epoch not in self._admitted)

    def abort(self, router_id: str, refs: Iterable[RequestRef]) -> None:
        """Forget these requests, every attempt up to the one named; unknown ones are ignored. No event is sent."""
        with self._lock:
            for ref in refs:
                request = self._requests.get((router_id, ref.request_id))
                if request is not None and request.reservation.ref.attempt <= ref.attempt:
                    self._abort(request)
        self._changed()

    def abort_router(self, router_id: str) -> list[RequestRef]:
        """Forget every request of a router; returns them."""
        refs = [ref for owner, ref in self.refs() if owner == router_id]
        self.abort(router_id, refs)
        return refs

    def refs(self) -> list[tuple[str, RequestRef]]:
        """Every request that is not over, with its router."""
        with self._lock:
            return [(router_id, r.reservation.ref) for (router_id, _), r in self._requests.items()]

    def drain(self) -> None:
        """Promise nothing new from now on."""
        self._draining = True

    # ---- prefill workers ----

    def allot(self, lease: Lease, pages: int, prefill: PeerRef) -> Sequence[int]:
        """Turn the prompt's share of the promise into pages that `prefill` may write; asked twice, the same pages.

        StaleEpoch when the lease is over or another worker's, InvalidArgument when the count is not the prompt's.
        """
        with self._lock:
            held = self._leases.pages_of(lease, prefill)
            if held is not None:
                return held
            request = self._leased[lease.epoch]
            if pages != request.prompt_pages:
                raise InvalidArgument(
                    "pages", f"{pages} asked for, the prompt of this lease fills {request.prompt_pages}"
                )
            request.pages = self._pool.advertise(lease, pages)
            request.promised -= pages
            self._leases.advertise(lease, prefill, request.pages)
            return tuple(request.pages)

    def release(self, lease: Lease, prefill: PeerRef) -> None:
        """`prefill` gave up and is quiet: the lease's pages are free. StaleEpoch when the lease is over."""
        with self._lock:
            self._follow(self._leases.release(lease, prefill), None)
        self._changed()

    def notice(self, notice: TransferNotice) -> None:
        """Transfer thread: every byte of the prompt's KV has arrived. A notice of an old lease is dropped and counted;
        one that does not fit the reservation fails the request, which is prefilled again."""
        with self._lock:
            try:
                change = self._leases.settle(notice.lease, notice.prefill)
            except StaleEpoch as error:
                log.info("a notice was dropped: %s", error.message)
                return
            if change.action is PageAction.ADMIT:
                self._admit(self._leased.pop(notice.lease.epoch), notice)
            else:
                self._follow(change, None)
        self._changed()

    def peer_gone(self, peer: PeerRef) -> None:
        """The process of `peer` is known dead: whatever it was to write is over."""
        with self._lock:
            reason = TransferFailed(f"prefill worker {peer.worker_id} is gone; prefill again elsewhere")
            for change in self._leases.peer_gone(peer):
                self._follow(change, reason)
        self._changed()

    def expire(self) -> None:
        """End what is due: leases without a heartbeat, quarantines of dead writers. Called by a timer."""
        with self._lock:
            reason = TransferFailed("the lease had no heartbeat and expired; prefill again")
            changes = self._leases.expire()
            for change in changes:
                self._follow(change, reason)
        if changes:
            self._changed()

    # ---- the running batch ----

    def join(self, room: int) -> list[DecodeRequest]:
        """At most `room` ready requests, oldest first, for the batch to run until they `leave`."""
        with self._lock:
            joining = [self._ready.popleft() for _ in range(min(room, len(self._ready)))]
            for request in joining:
                request.stage = Stage.RUNNING
            return joining

    def grow(self, request: DecodeRequest) -> None:
        """One more page of a running request's promise."""
        with self._lock:
            request.pages += self._pool.allocate(request.reservation.ref, 1, from_promise=True)
            request.promised -= 1

    def leave(self, request: DecodeRequest) -> None:
        """A running request is over: its pages are free at once."""
        with self._lock:
            self._free_owned(request)

    # ---- facts ----

    @property
    def open_requests(self) -> int:
        """Requests that are not over."""
        return len(self._requests)

    @property
    def open_leases(self) -> int:
        """Leases not yet settled, quarantined ones included."""
        return self._leases.open_leases

    @property
    def fenced(self) -> int:
        """Messages and notices dropped because their epoch or attempt was old, or they did not fit."""
        return self._leases.fenced + self._mismatches

    def _changed(self) -> None:
        """Outside the lock: leases may have ended and pages become free."""
        with self._lock:
            self._expect(self._leases.open_leases)
        self._wake()

    # ---- inside, under the lock ----

    def _known(self, reservation: Reservation) -> DecodeRequest | None:
        """This very reservation, if it was made before; an earlier attempt of it ends here."""
        known = self._requests.get((reservation.router_id, reservation.ref.request_id))
        if known is None or known.reservation == reservation:
            return known
        if known.reservation.ref.attempt >= reservation.ref.attempt:
            self._mismatches += 1
            raise StaleEpoch(f"attempt {reservation.ref.attempt} of {reservation.ref.request_id} is taken or over")
        self._abort(known)
        return None

    def _check_room(self, pages: int) -> None:
        if self._draining:
            raise Unavailable(f"worker {self._me.worker_id} is draining; ask another one")
        if pages > self._pages_limit:
            raise InvalidArgument(
                "max_tokens",
                f"prompt and answer need {pages} KV pages and worker {self._me.worker_id} has {self._pages_limit};"
                " ask for fewer tokens",
            )
        if self._pages_committed + pages > self._pages_limit:
            raise self._full()

    def _full(self) -> ResourceExhausted:
        return ResourceExhausted(
            f"worker {self._me.worker_id} has no KV pages left to promise; come back later",
            retry_after_s=self._config.retry_after_s,
        )

    def _grant(self, reservation: Reservation, pages: int) -> DecodeRequest:
        self._check_room(pages)
        try:
            self._pool.promise(pages)
        except ResourceExhausted:
            raise self._full() from None
        prompt_pages = pages_for(len(reservation.prompt_token_ids), self._page_tokens)
        try:
            lease = self._leases.grant(reservation.ref, reservation.prefill)
        except TandemError:
            self._pool.unpromise(pages)
            raise
        request = DecodeRequest(reservation, lease, prompt_pages, committed=pages, promised=pages)
        self._pages_committed += pages
        self._leased[lease.epoch] = self._requests[request.key] = request
        return request

    def _admit(self, request: DecodeRequest, notice: TransferNotice) -> None:
        problem = self._mismatch(request, notice)
        if problem:
            self._mismatches += 1
            self._pool.free_lease(notice.lease)
            self._end(request)
            self._fail(request, TransferFailed(f"what arrived for the request has {problem}; prefill again"))
            return
        request.pages = self._pool.adopt(notice.lease, request.reservation.ref)
        answer = request.reservation.answer
        request.token_ids = [*answer, notice.first_token_id]
        request.first_draw = notice.next_draw - len(answer)
        request.edges.append(EdgeStamp.now(Edge.DECODE_ADMITTED))
        request.stage = Stage.READY
        self._ready.append(request)
        self._admitted[notice.lease.epoch] = None
        if len(self._admitted) > ADMITTED_REMEMBERED:
            self._admitted.popitem(last=False)

    def _abort(self, request: DecodeRequest) -> None:
        if request.stage is Stage.LEASED:
            self._follow(self._leases.revoke(request.lease), None)
        elif request.stage is Stage.READY:
            self._ready.remove(request)
            self._free_owned(request)
        else:
            # The engine may be reading its pages now: the batch drops it at the step's end.
            request.cancelled = True
            self._requests.pop(request.key, None)

    def _follow(self, change: LeaseChange, failure: TandemError | None) -> None:
        """Do with the pages what the lease table says; a request that was alive is over, its router hears `failure`."""
        request = self._leased.pop(change.lease.epoch, None)
        if change.action is PageAction.QUARANTINE:
            self._pool.quarantine(change.lease)
        elif change.action is PageAction.FREE and request is not None:
            self._pool.free_lease(change.lease)
        elif change.action is PageAction.FREE:
            self._pool.free_quarantined(change.lease)
        if request is not None:
            self._end(request)
            if failure is not None:
                self._fail(request, failure)

    def _free_owned(self, request: DecodeRequest) -> None:
        self._pool.free(request.reservation.ref, request.pages)
        self._end(request)

    def _end(self, request: DecodeRequest) -> None:
        """Give back what is left of the promise; the pages are no longer this request's."""
        self._pool.unpromise(request.promised)
        self._pages_committed -= request.committed
        request.promised, request.pages, request.stage = 0, [], Stage.OVER
        if self._requests.get(request.key) is request:
            del self._requests[request.key]

    def _fail(self, request: DecodeRequest, error: TandemError) -> None:
        event = RequestEvent(
            request.reservation.ref, finish_reason=FinishReason.ERROR, error=ErrorDetail(error.code, error.message)
        )
        self._emit(RoutedEvent(request.reservation.router_id, event))

    def _mismatch(self, request: DecodeRequest, notice: TransferNotice) -> str:
        """What of a notice does not fit the reservation; empty when all does."""
        reservation = request.reservation
        if notice.pages != request.prompt_pages:
            return f"{notice.pages} pages instead of {request.prompt_pages}"
        if notice.token_hash != hash_token_ids(reservation.prompt_token_ids):
            return "the hash of another prompt"
        index = reservation.answered
        if reason_to_end(notice.first_token_id, index, request.prompt_tokens, reservation.sampling, self._model):
            return "a first token that ends the answer"
        return ""
