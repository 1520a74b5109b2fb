"""Admission to the decode phase: reservations, leases, and the KV that arrives under the leases.

The path of a request, by its queues (`decode_worker/request.py`):

  1. `reserve`  reserves pages for the prompt and the expected answer (`page_budget.py`), less the pages of the prompt
                that are cached here; `allocate_pages` allocates the prompt's pages, which one prefill worker may write
  2. `notice`   the KV has arrived: the pages pass to the request, the notice is checked at once, and the bytes are
                checked in the background (`kv_arrival.py`)
  3.            if both checks pass, the request is ready (`requests.py`)
  4.            the running batch takes the request and completes its answer (`requests.py`). If an older request needs
                a page and none is free, a younger one is preempted before its answer is complete (`preemption.py`)

If a request ends before its KV has arrived (abort, expiry, a dead prefill worker, a released lease), the lease table
decides whether the pages are freed or quarantined (`leased.py`).

Every method returns at once, may be called from any thread, and holds one lock.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from decode_worker.kv_arrival import ArrivalCheck, ArrivalHandler
from decode_worker.leased import LeasedRequests
from decode_worker.page_budget import PageBudget
from decode_worker.pulled_prefixes import PulledPrefix, PulledPrefixes
from decode_worker.request import DecodeRequest, Stage
from decode_worker.requests import DecodeRequests
from kv_transfer.checksums import PageChecks
from kv_transfer.fence import Fence, ProcessAlive, process_unknown
from kv_transfer.lease import LeaseTable
from kv_transfer.lease_change import PageAction
from tandem.engine.cache.prefix_cache import Prefix, PrefixCache
from tandem.engine.cache.tiers.tier import TierCounts
from tandem.protocol.errors import StaleEpoch, TransferFailed
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.messages import (
    GrantedLease,
    Lease,
    ModelFacts,
    PeerRef,
    RequestRef,
    Reservation,
    RoutedEvent,
    TransferNotice,
)
from tandem.settings.worker import WorkerSettings

log = logging.getLogger(__name__)


class DecodeAdmission:
    """Admits requests to a worker's decode phase, and owns their leases."""

    def __init__(
        self,
        *,
        config: WorkerSettings,
        me: PeerRef,
        cache: PrefixCache,
        model: ModelFacts,
        clock: Callable[[], float],
        expect: Callable[[int], None],
        emit: Callable[[RoutedEvent], None],
        wake: Callable[[], None],
        transport_poll_s: Callable[[], float],
        same_host: Callable[[PeerRef], bool],
        process_alive: ProcessAlive = process_unknown,
        checks: PageChecks | None = None,
    ) -> None:
        """Create the admission; `expect`, `emit` and `wake` are called from any thread and must not block.

        Args:
            config: The worker's settings.
            me: The id and incarnation of this worker.
            model: The model's facts, for the limits on requests.
            clock: The monotonic clock of leases, in seconds.
            cache: The worker's prefix cache, which owns the page pool.
            expect: Receives the number of open leases, each of which may still get a notice; called under the lock, so
                that the counts arrive in order.
            emit: Receives the events for the routers.
            wake: Called when the step loop has work.
            transport_poll_s: The transport's clock (`Receiver.transport_poll_s`).
            same_host: Returns True if the prefill worker is known to be on this host.
            process_alive: Tells whether the process of a prefill worker is alive (`kv_transfer.fence.ProcessAlive`).
            checks: Compares the bytes that arrived with those that were sent; None = they are not compared.
        """
        self._config = config
        self._clock = clock
        self._cache = cache
        self._page_tokens = cache.page_tokens
        self._expect = expect
        self._wake = wake
        fence = Fence(
            config.write_window_s,
            lambda peer: config.quarantine_s if same_host(peer) else config.quarantine_far_s,
            transport_poll_s,
            process_alive,
        )
        self._leases: LeaseTable = LeaseTable(clock, config.kv_lease_s, fence)
        self.lock = threading.Lock()
        """Guards the requests; the running batch uses the same lock."""
        self._budget = PageBudget(config, me.worker_id, cache, self._leases, model=model, clock=clock)
        self.requests = DecodeRequests(cache, self._budget, emit)
        self._pulled = PulledPrefixes(self._leases, cache, checks)
        self._leased = LeasedRequests(me, self._leases, cache, self._budget, self.requests, pulled=self._pulled)
        self.arrival = ArrivalCheck(me, model, checks)
        self._arrivals = ArrivalHandler(
            self.requests, self.arrival, self.lock, self._changed, config.kv_transfer_deadline_s
        )
        self._stale_attempts = 0
        self.expired_leases = 0
        """The number of leases that ended because no heartbeat renewed them."""

    # ---- routers ----

    def reserve(self, reservation: Reservation, adapter: int = 0) -> GrantedLease:
        """Grant a lease to a validated reservation and reserve its pages.

        A repeated reservation gets the same lease. Raises ResourceExhausted with a retry hint if there are too few
        pages now, InvalidArgument if the request can never fit, StaleEpoch if this attempt has ended or belongs to
        another reservation, RoleClosed while closed, and Unavailable if the prefill worker is gone.
        """
        # A prompt whose log probabilities are wanted is computed completely, so it must not read cached pages.
        reads = not reservation.scores_prompt
        prefix = self._cache.prefix(
            reservation.prompt_token_ids,
            reservation.cache_salt,
            reads=reads,
            tenant=reservation.tenant,
            retention_s=reservation.retention_s,
            hinted_s=reservation.hinted_s,
            hinted_tokens=reservation.hinted_tokens,
        )
        with self.lock:
            try:
                request = self._known(reservation) or self._leased.grant(reservation, prefix, adapter)
            finally:
                self._expect(self._leases.open_leases)
        return GrantedLease(request.lease, self._config.kv_lease_s, request.skipped * self._page_tokens)

    def check_accepts(self, reservation: Reservation) -> None:
        """Raise the errors of `reserve` for a new request that can be found without looking up its prefix."""
        with self.lock:
            if self.requests.find(reservation.router_id, reservation.ref.request_id) is None:
                self._leased.check_accepts(reservation)

    def heartbeat(self, leases: Iterable[Lease]) -> tuple[Lease, ...]:
        """Renew these leases, and return those that have ended although their KV has not arrived."""
        unknown = self._leases.renew(leases)
        with self.lock:
            return tuple(lease for lease in unknown if not self.requests.has_arrived(lease))

    def abort(self, router_id: str, refs: Iterable[RequestRef]) -> None:
        """End these requests if their attempt is at most the one in `refs`.

        Unknown requests are ignored; no event is sent.
        """
        with self.lock:
            for ref in refs:
                request = self.requests.find(router_id, ref.request_id)
                if request is not None and request.reservation.ref.attempt <= ref.attempt:
                    self._abort(request)
        self._changed()

    def abort_router(self, router_id: str) -> list[RequestRef]:
        """End every request of a router and return the references of these requests."""
        refs = [ref for owner, ref in self.refs() if owner == router_id]
        self.abort(router_id, refs)
        return refs

    def refs(self) -> list[tuple[str, RequestRef]]:
        """Return every request that has not ended, as pairs of router id and request reference."""
        with self.lock:
            return self.requests.refs()

    def adapters(self) -> set[str]:
        """Return the adapter hashes of all requests that may still be in a step; "" stands for the base model."""
        with self.lock:
            return self.requests.adapters()

    def close(self, why: str) -> None:
        """Reject new reservations until `open`; accepted requests continue."""
        with self.lock:
            self._budget.close(why)

    def open(self) -> None:
        """Accept reservations again after `close`."""
        with self.lock:
            self._budget.open()

    def limit(self, max_pages: int | None) -> None:
        """Limit the number of pages of all requests together (`PageBudget.limit`)."""
        with self.lock:
            self._budget.limit(max_pages)

    # ---- prefill workers ----

    def allocate_pages(self, lease: Lease, pages: int, prefill: PeerRef) -> Sequence[int]:
        """Allocate the lease's pages and return them; `prefill` may begin writes within `write_window_s` seconds.

        `pages` is the number of pages that the prompt fills. The result leaves out the prompt's leading pages whose KV
        this worker has cached. A repeated call returns the same pages and restarts the window. Raises StaleEpoch if the
        lease has ended or belongs to another worker, InvalidArgument if `pages` is not the number of pages of the
        prompt.
        """
        with self.lock:
            return self._leased.allocate_pages(lease, pages, prefill)

    def cached_pages(self, lease: Lease) -> int:
        """Return the number of leading pages of a local prompt that are read from the cache.

        Raises StaleEpoch if the lease has ended or belongs to another worker.
        """
        with self.lock:
            return self._leased.cached_pages(lease)

    def allocate_chunk_pages(self, lease: Lease, pages: int, position: int, prefill: PeerRef) -> Sequence[int]:
        """Allocate at most `pages` more pages for a local prompt of a model with sliding windows, and return them.

        `position` is the position of the next token to be computed; cached pages before its window are released. Raises
        StaleEpoch if the lease has ended.
        """
        with self.lock:
            return self._leased.allocate_chunk_pages(lease, pages, position, prefill)

    def prolong(self, leases: Iterable[Lease], prefill: PeerRef) -> tuple[Lease, ...]:
        """Allow `prefill` to begin writes under these leases for another `write_window_s` seconds.

        Returns the leases that cannot be prolonged.
        """
        return self._leases.prolong(leases, prefill)

    def release(self, lease: Lease, prefill: PeerRef, *, in_doubt: bool = False) -> None:
        """Free the pages of a lease that the prefill worker has released without having sent its notice.

        With `in_doubt`, a write has failed and its data may still arrive, so the pages are quarantined first. Raises
        StaleEpoch if the lease has ended.
        """
        with self.lock:
            for change in self._leases.release(lease, prefill, in_doubt=in_doubt):
                self._leased.apply(change, None)
        self._changed()

    def delivered(self, leases: Iterable[Lease], prefill: PeerRef) -> None:
        """Fail the requests of those leases whose notices have not arrived, and quarantine their pages.

        `prefill` sent the notices of all `leases` so long ago that a notice that has not arrived is lost. Leases whose
        notices have arrived are not affected.
        """
        with self.lock:
            lost = self._leases.delivered(leases, prefill)
            for change in lost:
                log.warning("the notice of %s from %s was lost", change.lease, prefill.worker_id)
            self._leased.apply_all(lost, TransferFailed("the notice of the transfer was lost; prefill again"))
        if lost:
            self._changed()

    def notice(self, notice: TransferNotice, pages: Sequence[int] = (), states: Collection[int] = ()) -> None:
        """Process a notice: if it is the last one of its request, the KV has arrived completely.

        Called on a transfer thread.

        For a local prompt, `pages` are its pages, listed as by `KvPages`, and `states` the numbers of the state pages
        that others may reuse (`Prefix.states`); otherwise both are empty. A notice of an ended lease is dropped and
        counted. If a notice does not match the reservation, the request fails, and its router starts another attempt.
        """
        seen = EventTime.now(LifecycleEvent.NOTICE_SEEN)
        with self.lock:
            try:
                change = self._leases.complete(notice.lease, notice.prefill, notice.part, notice.parts)
            except StaleEpoch as error:
                log.info("a notice was dropped: %s", error.message)
                return
            if change is None:
                return
            if change.action is PageAction.ADMIT and change.lease in self._pulled:
                self._pulled.arrive(change, notice)
                self._expect(self._leases.open_leases)
                return
            arrived = self._leased.complete(change)
            if arrived is not None:
                arrived.event_times.append(seen)
                self._arrivals.handle(arrived, notice, pages, states, self._clock())
            checking = arrived is not None and arrived.stage is Stage.CHECKING
        self._changed(work=not checking)

    # ---- pulls of prefixes ----

    def pull(self, prefix: Prefix, source: PeerRef) -> PulledPrefix:
        """Grant `source` a lease under which it may send the pages of a prefix; the caller asks it to do so.

        `pull.done` completes when the pages are indexed or the lease has ended. Raises Unavailable if `source` is
        assumed dead.
        """
        with self.lock:
            pull = self._pulled.grant(prefix, source)
            self._expect(self._leases.open_leases)
            return pull

    def stop_pull(self, pull: PulledPrefix) -> None:
        """End the lease of a pull unless its pages have arrived; they are quarantined while they may be written."""
        with self.lock:
            if pull.lease in self._pulled:
                self._leased.apply(self._leases.revoke(pull.lease), None)
        self._changed()

    @property
    def pull_counts(self) -> TierCounts:
        """The counts of pages that were pulled from other workers."""
        return self._pulled.counts

    # ---- the end of writers ----

    def peer_gone(self, peer: PeerRef) -> None:
        """End the leases of `peer`, which is assumed dead: quarantine their pages and fail their requests."""
        with self.lock:
            reason = TransferFailed(f"prefill worker {peer.worker_id} is gone; prefill again elsewhere")
            self._leased.apply_all(self._leases.peer_gone(peer), reason)
        self._changed()

    def peer_back(self, peer: PeerRef) -> None:
        """Grant leases to `peer` again: it serves, although it was assumed dead."""
        self._leases.peer_back(peer)

    def expire(self) -> None:
        """End the leases, quarantines and KV checks that have exceeded their time limits. Called by a timer.

        They are leases without heartbeat, quarantines whose pages have become safe, and checks without a result.
        """
        with self.lock:
            reason = TransferFailed("the lease had no heartbeat and expired; prefill again")
            changes = self._leases.expire()
            self.expired_leases += sum(change.action is not PageAction.FREE for change in changes)
            self._leased.apply_all(changes, reason)
            late = self.requests.end_late_checks(self._clock())
        if changes or late:
            self._changed()

    # ---- facts ----

    @property
    def open_requests(self) -> int:
        """The number of requests that have not ended."""
        return len(self.requests)

    @property
    def write_window_s(self) -> float:
        """The seconds after `allocate_pages` within which a prefill worker may begin a write."""
        return self._config.write_window_s

    @property
    def open_leases(self) -> int:
        """The number of leases that have not ended, including quarantined ones."""
        return self._leases.open_leases

    @property
    def used_share(self) -> float:
        """The share of the pages for answers that are in use or reserved; 0 if answers may have all pages."""
        with self.lock:
            return self._budget.used_share

    @property
    def pages_left(self) -> int:
        """The number of additional pages that requests may hold, provided that the pool has them."""
        return self._budget.left

    @property
    def fenced(self) -> int:
        """The number of messages and notices that were rejected: for an ended lease or attempt, or for a mismatch.

        A mismatch is a notice that differs from the reservation, or a transfer whose checksums are wrong.
        """
        return self._leases.fenced + self._stale_attempts + self.arrival.refused

    @property
    def not_ready(self) -> str:
        """The reason why reservations are rejected now; empty if they are accepted."""
        return self._budget.not_ready

    def _changed(self, *, work: bool = True) -> None:
        """Report the number of open leases to `expect`, and update `not_ready`, after a change.

        Must be called without the lock. With `work`, the step loop is woken, because a request may be ready, or a
        request that waits for pages may continue. Callers pass False if neither is possible: a needless wake-up takes
        the interpreter lock from other threads.
        """
        with self.lock:
            self._expect(self._leases.open_leases)
            self._budget.update_lost()
        if work:
            self._wake()

    # ---- inside, under the lock ----

    def _known(self, reservation: Reservation) -> DecodeRequest | None:
        """Return the existing request of this reservation, or None. An earlier attempt of the request is aborted."""
        known = self.requests.find(reservation.router_id, reservation.ref.request_id)
        if known is None or known.reservation == reservation:
            return known
        if known.reservation.ref.attempt >= reservation.ref.attempt:
            self._stale_attempts += 1
            raise StaleEpoch(f"attempt {reservation.ref.attempt} of {reservation.ref.request_id} is taken or over")
        self._abort(known)
        return None

    def _abort(self, request: DecodeRequest) -> None:
        if request.stage is Stage.LEASED:
            self._leased.revoke(request)
        else:
            self.requests.cancel(request)
