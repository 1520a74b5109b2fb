"""The decode worker's table of leases: which prefill worker may write to each page, and when a page is safe again.

    granted ──advertise──► advertised ──complete──► ended (admit the pages)
       │                       │ revoke, expire, peer_gone, release in doubt, delivered
       │ revoke, expire,       ▼
       │ release, peer_gone  quarantined ──release, late notice, or end of the grace period──► ended (free)
       ▼
     ended (no pages)

A granted lease reserves a number of pages but has none yet; pages are attached when the writer requests them. From then
on the writer may write until it has sent its notice, which follows every byte of its writes, or has released the lease,
which states that no further write will follow, or is dead. No pages are freed before one of these three events. A
writer that has sent its notice sends no release; a writer that failed or was stopped does. Its release proves that it
is quiescent only if every write has landed. If a write has failed, the release is in doubt: bytes of a broken
connection may be in this host's buffers, so the pages stay quarantined for the grace period of a dead writer. Some time
after the notice the writer reports it as `delivered`. If the notice was lost, this ends the lease in the same way as a
release in doubt, because a connection that has lost a notice was broken.

The outcome when two events cross; the event of the first column came first. `assumed dead`: the writer is assumed dead,
but may be alive.

    first            then              outcome
    abort            allocate_pages    StaleEpoch: nothing was advertised, the writer stops
    abort            notice            the notice proves quiescence: fenced, pages freed, request not admitted
    abort            release           pages freed; in doubt: after the grace period
    abort            expiry            nothing: a quarantined lease has no deadline
    abort            assumed dead      pages freed once they are safe, see below
    notice           abort             StaleEpoch: the lease has ended, the caller aborts the running request
    notice           release           StaleEpoch: the pages belong to the request
    notice           expiry, death     nothing: the lease has ended
    notice           delivered         nothing: the lease has ended
    release          notice            StaleEpoch: dropped; its bytes had landed before either was sent
    rel. in doubt    notice            as after an abort: the notice follows every write, so nothing is left in doubt
    rel. in doubt    assumed dead      nothing: the grace period continues
    delivered        notice            as after a release in doubt: the notice was not lost but late
    release          abort, expiry     StaleEpoch, nothing
    expiry           renew             reported as unknown, the router makes its next attempt
    expiry           allocate_pages, notice,    as after an abort
                     release, death
    assumed dead     notice            as after an abort: the notice had been sent before the death
    assumed dead     release           pages freed at once; in doubt: after the grace period
    assumed dead     abort             StaleEpoch: already quarantined, the grace period continues
    assumed dead     grant for it      Unavailable
    assumed dead     is alive: allocate_pages   StaleEpoch, and without permission it begins no write
    assumed dead     is alive: write   lands in quarantined pages, which are freed once they are safe
    assumed dead     serves again      new leases may be granted to it; its old ones stay as they are
    next attempt     any event of the  as after an abort: the caller revokes the earlier lease before it grants another
      granted        earlier attempt

`fence.py` decides when the pages of a writer that is assumed dead are safe.

The table moves no pages: each call returns the actions that the caller must take on them. Time comes from the injected
clocks (seconds, monotonic); only durations are sent between workers.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache

from kv_transfer.fence import Fence, OutstandingWrites
from kv_transfer.lease_change import LeaseChange, PageAction
from kv_transfer.removed_peers import RemovedPeers
from tandem.protocol.errors import StaleEpoch, Unavailable
from tandem.protocol.messages import Lease, PeerRef, RequestRef


@dataclass(slots=True)
class _Entry:
    """A lease that has not ended; `page_ids` is None as long as no pages are attached."""

    lease: Lease
    prefill: PeerRef
    expires_at: float
    """The time, by the table's clock, at which the lease is revoked unless a heartbeat renews it."""
    exposure: OutstandingWrites
    page_ids: tuple[int, ...] | None = None
    quarantined: bool = False
    parts: set[int] = field(default_factory=set)
    """The numbers of the notices that have arrived."""

    def change(self, action: PageAction) -> LeaseChange:
        return LeaseChange(self.lease, self.prefill, action, self.page_ids or ())


class LeaseTable:
    """All leases that this worker has granted and that have not ended. Thread-safe; no call blocks.

    Owned by the admission. The table knows leases, not requests: the caller ensures that a request has one lease at a
    time.
    """

    def __init__(self, clock: Callable[[], float], duration_s: float, fence: Fence) -> None:
        """Create the table; `duration_s` is the time in seconds after which a lease without heartbeat is revoked."""
        self.duration_s = duration_s
        self._fence = fence
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._gone = RemovedPeers()
        self._epoch = 0
        self._fenced = 0

    def grant(self, ref: RequestRef, prefill: PeerRef) -> Lease:
        """Grant this attempt a lease under which only `prefill` may write.

        Raises Unavailable if `prefill` is assumed dead.
        """
        with self._lock:
            if prefill in self._gone:
                raise Unavailable(f"prefill worker {prefill.worker_id} is gone; choose another")
            self._epoch += 1
            lease = Lease(ref.request_id, ref.attempt, self._epoch)
            exposure = OutstandingWrites(self._fence, prefill)
            self._entries[self._epoch] = _Entry(lease, prefill, self._clock() + self.duration_s, exposure)
            return lease

    def renew(self, leases: Iterable[Lease]) -> tuple[Lease, ...]:
        """Restart the lifetime of these leases, and return those of them that have ended or are revoked.

        Leases that have ended are not counted in `fenced` here.
        """
        with self._lock:
            expires_at = self._clock() + self.duration_s
            unknown = []
            for lease in leases:
                entry = self._entries.get(lease.epoch)
                if entry is None or entry.lease != lease or entry.quarantined:
                    unknown.append(lease)
                else:
                    entry.expires_at = expires_at
            return tuple(unknown)

    def permit(self, lease: Lease, prefill: PeerRef) -> tuple[int, ...] | None:
        """Permit `prefill` to begin writes for `window_s` seconds, and return the lease's pages.

        Returns None if no pages are attached yet. Raises StaleEpoch if the lease has ended or belongs to another
        worker.
        """
        with self._lock:
            entry = self._live_entry(lease, prefill)
            entry.exposure.permit(self._clock())
            return entry.page_ids

    def prolong(self, leases: Iterable[Lease], prefill: PeerRef) -> tuple[Lease, ...]:
        """Permit `prefill` to begin writes for another `window_s` seconds; return the leases for which it is refused.

        Refused are leases that have ended, are revoked, have no pages, or belong to another worker. They are not
        counted in `fenced`.
        """
        with self._lock:
            now, over = self._clock(), []
            for lease in leases:
                entry = self._entries.get(lease.epoch)
                known = entry if entry is not None and (entry.lease, entry.prefill) == (lease, prefill) else None
                if known is None or known.quarantined or known.page_ids is None:
                    over.append(lease)
                else:
                    known.exposure.permit(now)
            return tuple(over)

    def advertise(self, lease: Lease, prefill: PeerRef, page_ids: Iterable[int]) -> None:
        """Attach the pages to which the writer may write and whose ids it will be sent.

        Raises StaleEpoch if the lease has ended; the caller then keeps the pages, and the writer does not know them.
        Raises ValueError if the lease already has pages.
        """
        with self._lock:
            entry = self._live_entry(lease, prefill)
            if entry.page_ids is not None:
                raise ValueError(f"{lease} already advertises pages")
            entry.page_ids = tuple(page_ids)
            entry.exposure.permit(self._clock())

    def complete(self, lease: Lease, prefill: PeerRef, part: int = 0, parts: int = 1) -> LeaseChange | None:
        """Record notice `part` of `parts`; with the last of them, end the lease and return ADMIT.

        Returns None if other notices are still to come, and FREE if the lease was already revoked, which is counted in
        `fenced`. Raises StaleEpoch if the lease has ended, belongs to another worker, or never had pages.
        """
        with self._lock:
            entry = self._entry(lease, prefill)
            if entry.page_ids is None:
                raise self._stale(lease, "a notice came before any pages were asked for")
            entry.parts.add(part)
            if len(entry.parts) < parts:
                return None
            # A notice is the writer's last act, so the pages are safe although the lease was revoked.
            if entry.quarantined:
                self._fenced += 1
                return self._end(entry, PageAction.FREE)
            return self._end(entry, PageAction.ADMIT)

    def release(self, lease: Lease, prefill: PeerRef, *, in_doubt: bool = False) -> tuple[LeaseChange, ...]:
        """End a lease whose writer begins no further write, and return FREE, or NONE if the lease never had pages.

        With `in_doubt`, a write has failed and its data may still land: returns QUARANTINE, or nothing if the lease is
        quarantined already. That quarantine ends (see `expire`) after the grace period of a dead writer. Raises
        StaleEpoch as `complete` does.
        """
        with self._lock:
            entry = self._entry(lease, prefill)
            if in_doubt:
                return self._doubt(entry)
            return (self._end(entry, PageAction.NONE if entry.page_ids is None else PageAction.FREE),)

    def delivered(self, leases: Iterable[Lease], prefill: PeerRef) -> tuple[LeaseChange, ...]:
        """Quarantine those of these leases whose notices have not arrived, as after a release in doubt.

        `prefill` sent the notices so long ago that they would have arrived. Leases that have ended are not counted in
        `fenced` here.
        """
        with self._lock:
            named = {lease.epoch: lease for lease in leases}
            unheard = [entry for epoch in named if (entry := self._entries.get(epoch)) and entry.lease == named[epoch]]
            return tuple(change for entry in unheard if entry.prefill == prefill for change in self._doubt(entry))

    def revoke(self, lease: Lease) -> LeaseChange:
        """Revoke a lease whose request ended before its notice arrived; return QUARANTINE, or NONE if it has no pages.

        Raises StaleEpoch if the lease has already ended.
        """
        with self._lock:
            return self._revoke(self._live_entry(lease, None))

    def peer_gone(self, peer: PeerRef) -> tuple[LeaseChange, ...]:
        """Revoke all leases of `peer` and of its earlier incarnations, because their processes are assumed dead.

        Their quarantines end (see `expire`) once no write of these processes can land.
        """
        with self._lock:
            self._gone.add(peer)
            changes, process_alive = [], cache(self._fence.process_alive)
            for entry in [e for e in self._entries.values() if e.prefill in self._gone]:
                if not entry.quarantined:
                    changes.append(self._revoke(entry))
                entry.exposure.believe_dead()
                entry.exposure.is_safe(self._clock(), process_alive)
            return tuple(changes)

    def peer_back(self, peer: PeerRef) -> None:
        """Allow leases again for an incarnation that was assumed dead and serves.

        The quarantines of its earlier leases are not affected.
        """
        with self._lock:
            self._gone.restore(peer)

    def expire(self) -> tuple[LeaseChange, ...]:
        """Revoke leases that no heartbeat has renewed in time, and end quarantines whose pages have become safe.

        The latter are quarantines after a writer's death or a release in doubt. Must be called often.
        """
        with self._lock:
            now, process_alive = self._clock(), cache(self._fence.process_alive)
            changes = []
            for entry in list(self._entries.values()):
                if entry.quarantined:
                    if entry.exposure.is_safe(now, process_alive):
                        changes.append(self._end(entry, PageAction.FREE))
                elif now >= entry.expires_at:
                    changes.append(self._revoke(entry))
            return tuple(changes)

    def silent_writers(self) -> tuple[str, ...]:
        """Return the ids of the workers whose writes may still land in quarantined pages."""
        with self._lock:
            return tuple(sorted({entry.prefill.worker_id for entry in self._entries.values() if entry.quarantined}))

    @property
    def fenced(self) -> int:
        """The number of messages and notices that named an ended or revoked lease."""
        return self._fenced

    @property
    def open_leases(self) -> int:
        """The number of leases that have not ended, including quarantined ones.

        It is passed to `Receiver.expect`, because a write may complete only while the receiver polls.
        """
        with self._lock:
            return len(self._entries)

    def _entry(self, lease: Lease, prefill: PeerRef) -> _Entry:
        entry = self._entries.get(lease.epoch)
        if entry is None or entry.lease != lease:
            raise self._stale(lease, "it is over")
        if entry.prefill != prefill:
            raise self._stale(lease, f"it is {entry.prefill.worker_id}/{entry.prefill.incarnation}'s alone")
        return entry

    def _live_entry(self, lease: Lease, prefill: PeerRef | None) -> _Entry:
        entry = self._entries.get(lease.epoch)
        if entry is not None and prefill is not None:
            entry = self._entry(lease, prefill)
        if entry is None or entry.lease != lease or entry.quarantined:
            raise self._stale(lease, "it is over or revoked")
        return entry

    def _stale(self, lease: Lease, why: str) -> StaleEpoch:
        self._fenced += 1
        what = f"the lease of request {lease.request_id}, attempt {lease.attempt},"
        return StaleEpoch(f"{what} was refused: {why}; drop this attempt")

    def _doubt(self, entry: _Entry) -> tuple[LeaseChange, ...]:
        """Quarantine a lease whose writer begins no further write, but whose earlier writes may still land."""
        entry.exposure.writer_stopped()
        entry.exposure.is_safe(self._clock(), self._fence.process_alive)  # starts the grace period
        return () if entry.quarantined else (self._revoke(entry),)

    def _revoke(self, entry: _Entry) -> LeaseChange:
        if entry.page_ids is None:
            return self._end(entry, PageAction.NONE)
        entry.quarantined = True
        return entry.change(PageAction.QUARANTINE)

    def _end(self, entry: _Entry, action: PageAction) -> LeaseChange:
        del self._entries[entry.lease.epoch]
        return entry.change(action)
