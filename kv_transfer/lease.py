"""The decode side's table of leases: who may write which pages, and when a page is safe again.

    granted ──advertise──► advertised ──settle──► ended (admit the pages)
       │                       │ revoke, expire, peer_gone
       │ revoke, expire,       ▼
       │ release, peer_gone  quarantined ──release, late notice, or writer dead for a while──► ended (free)
       ▼
     ended (no pages)

A lease is granted as a promise of so many pages and holds none; pages are attached when the writer asks for them.
From then on the writer may write until it has delivered its notice (its last act, after every byte), or has released
the lease (its word that nothing is in flight and nothing will follow), or is dead. No pages are freed before one of
the three. A writer whose notice has left sends no release; one that failed or was told to stop does. Some time after
the notice it says that this was `delivered`, which is the end of a lease whose notice was lost.

What happens when events cross; the first column came first:

    first            then              outcome
    abort            allot request     StaleEpoch: nothing was advertised, the writer stops
    abort            notice            the notice is the proof of quiet: fenced, pages freed, request not admitted
    abort            release           pages freed
    abort            expiry            nothing: a quarantined lease has no deadline
    abort            writer dies       pages freed a bounded time after the death is known, see below
    notice           abort             StaleEpoch: the lease is settled, the caller aborts the running request
    notice           release           StaleEpoch: the pages belong to the request
    notice           expiry, death     nothing: the lease is over
    notice           delivered         nothing: the lease is over
    release          notice            StaleEpoch: dropped; its bytes had landed before either was sent
    delivered        notice            the same: it was not lost after all, and comes too late
    release          abort, expiry     StaleEpoch, nothing
    expiry           renew             reported as unknown, the router takes its next attempt
    expiry           allot, notice,    as after an abort
                     release, death
    writer dies      notice            as after an abort: it had left before the death
    writer dies      release           pages freed at once
    writer dies      abort             StaleEpoch: already quarantined, the clock runs on
    writer dies      grant for it      Unavailable
    writer dies      it lives: allot   StaleEpoch, and without permission it begins no write
    writer dies      it lives: write   lands in quarantine: pages are freed after the last permission and the grace
    writer dies      it is back        welcome to new leases; for those it had all stays as it is
    next attempt     anything of the   as after an abort: the caller revokes the earlier lease before it grants another
      granted        earlier attempt

A death is a belief: a worker that is cut off looks like a dead one and may go on to write. So permission to write
expires (`Fence.window_s`), and the writer begins nothing past it. What began in time, or was sent by one that is truly
dead, has to land in the grace, which counts only time in which this worker's transport listened: bytes in its socket
buffers land when it looks. Between processes of one host nothing else is on the way. Over a network this is a bound,
not a proof: a switch or a retransmission may hold bytes longer than the grace for distant writers, which is longer for
that reason; and so may a writer that is stopped between its look at the clock and its write.

The table moves no pages: each call returns what the caller has to do with them. Time comes from the injected clocks
(seconds, monotonic); only durations cross the wire.
"""

import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from wire.errors import StaleEpoch, Unavailable
from wire.messages import Lease, PeerRef, RequestRef


class PageAction(Enum):
    """What the caller does with the pages of a lease that changed."""

    NONE = "none"
    """The lease is over and never held pages; its promise is given back."""
    QUARANTINE = "quarantine"
    """Advertised → quarantined: the request is over, the pages are not yet safe."""
    FREE = "free"
    """The writer is quiet: advertised or quarantined → free."""
    ADMIT = "admit"
    """All bytes have arrived: advertised → owned by the request."""


@dataclass(frozen=True, slots=True)
class LeaseChange:
    """A lease left its state. Every lease ends with exactly one of NONE, FREE or ADMIT, perhaps after QUARANTINE."""

    lease: Lease
    prefill: PeerRef
    action: PageAction
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fence:
    """When pages are safe from a writer that is believed dead."""

    window_s: float
    """For how long a permission lets it begin to write."""
    grace_s: Callable[[PeerRef], float]
    """How long what it has begun may take to land."""
    listened_s: Callable[[], float]
    """The clock of the grace: see `Receiver.listened_s`."""


@dataclass(slots=True)
class _Entry:
    """A lease that has not ended; `page_ids` is None while it is a promise.

    `permitted_at`: when its writer last got permission; `grace_s`: set once that is believed dead; `safe_at`, on the
    clock of the grace: set when the permission has ended, too.
    """

    lease: Lease
    prefill: PeerRef
    expires_at: float
    page_ids: tuple[int, ...] | None = None
    quarantined: bool = False
    permitted_at: float = -math.inf
    grace_s: float | None = None
    safe_at: float | None = None

    def change(self, action: PageAction) -> LeaseChange:
        return LeaseChange(self.lease, self.prefill, action, self.page_ids or ())


class LeaseTable:
    """Every lease this worker granted that has not ended. Thread-safe; calls never block.

    It knows leases, not requests: that a request has one lease at a time is the caller's to keep.
    """

    def __init__(self, clock: Callable[[], float], duration_s: float, fence: Fence) -> None:
        """`duration_s`: life without a heartbeat."""
        self.duration_s = duration_s
        self._fence = fence
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._gone: dict[str, int] = {}
        self._epoch = 0
        self._fenced = 0

    def grant(self, ref: RequestRef, prefill: PeerRef) -> Lease:
        """A promise to this attempt, to be written by `prefill` alone. Unavailable when that writer is known gone."""
        with self._lock:
            if self._is_gone(prefill):
                raise Unavailable(f"prefill worker {prefill.worker_id} is gone; choose another")
            self._epoch += 1
            lease = Lease(ref.request_id, ref.attempt, self._epoch)
            self._entries[self._epoch] = _Entry(lease, prefill, self._clock() + self.duration_s)
            return lease

    def renew(self, leases: Iterable[Lease]) -> tuple[Lease, ...]:
        """Start the duration of each anew; return those that are over or revoked. Not counted as fenced."""
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
        """Page ids this lease advertises, which `prefill` may begin to write for `window_s` from now on; None while it
        is a promise. StaleEpoch when it is over or not `prefill`'s.
        """
        with self._lock:
            entry = self._live_entry(lease, prefill)
            entry.permitted_at = self._clock()
            return entry.page_ids

    def advertise(self, lease: Lease, prefill: PeerRef, page_ids: Iterable[int]) -> None:
        """The writer learns these pages next and may write them. StaleEpoch: the pages stay the caller's, unpublished.

        ValueError when the lease already advertises pages.
        """
        with self._lock:
            entry = self._live_entry(lease, prefill)
            if entry.page_ids is not None:
                raise ValueError(f"{lease} already advertises pages")
            entry.page_ids = tuple(page_ids)
            entry.permitted_at = self._clock()

    def settle(self, lease: Lease, prefill: PeerRef) -> LeaseChange:
        """The notice arrived: ADMIT; FREE when the lease was revoked meanwhile (counted as fenced).

        StaleEpoch when it is over, not `prefill`'s, or never advertised pages.
        """
        with self._lock:
            entry = self._entry(lease, prefill)
            if entry.page_ids is None:
                raise self._stale(lease, "a notice came before any pages were asked for")
            if entry.quarantined:
                self._fenced += 1
                return self._end(entry, PageAction.FREE)
            return self._end(entry, PageAction.ADMIT)

    def release(self, lease: Lease, prefill: PeerRef) -> LeaseChange:
        """The writer is quiet and gives up: FREE, or NONE when it never held pages. StaleEpoch as in `settle`."""
        with self._lock:
            entry = self._entry(lease, prefill)
            return self._end(entry, PageAction.NONE if entry.page_ids is None else PageAction.FREE)

    def delivered(self, leases: Iterable[Lease], prefill: PeerRef) -> tuple[LeaseChange, ...]:
        """The writer's notices of these leases have long left: those still open end as after a release, for theirs was
        lost. Not counted as fenced.
        """
        with self._lock:
            named = {lease.epoch: lease for lease in leases}
            unheard = [entry for epoch in named if (entry := self._entries.get(epoch)) and entry.lease == named[epoch]]
            return tuple(
                self._end(entry, PageAction.NONE if entry.page_ids is None else PageAction.FREE)
                for entry in unheard
                if entry.prefill == prefill
            )

    def revoke(self, lease: Lease) -> LeaseChange:
        """The request is over before its notice: QUARANTINE, or NONE without pages. StaleEpoch when already over."""
        with self._lock:
            return self._revoke(self._live_entry(lease, None))

    def peer_gone(self, peer: PeerRef) -> tuple[LeaseChange, ...]:
        """The process of `peer`, and so of its earlier incarnations, is believed dead: revoke all it may write.

        Its quarantines end (see `expire`) the grace after its last permission has ended.
        """
        with self._lock:
            self._gone[peer.worker_id] = max(peer.incarnation, self._gone.get(peer.worker_id, 0))
            changes = []
            for entry in [e for e in self._entries.values() if self._is_gone(e.prefill)]:
                if not entry.quarantined:
                    changes.append(self._revoke(entry))
                if entry.grace_s is None:
                    entry.grace_s = self._fence.grace_s(entry.prefill)
                    self._is_safe(entry)
            return tuple(changes)

    def peer_back(self, peer: PeerRef) -> None:
        """This run was believed dead and serves: it may be granted leases again. Its quarantines end as they would."""
        with self._lock:
            if self._gone.get(peer.worker_id) == peer.incarnation:
                self._gone[peer.worker_id] = peer.incarnation - 1

    def expire(self) -> tuple[LeaseChange, ...]:
        """What is due now: leases without a heartbeat are revoked, quarantines of dead writers end. Call it often."""
        with self._lock:
            now = self._clock()
            changes = []
            for entry in list(self._entries.values()):
                if entry.quarantined:
                    if self._is_safe(entry):
                        changes.append(self._end(entry, PageAction.FREE))
                elif now >= entry.expires_at:
                    changes.append(self._revoke(entry))
            return tuple(changes)

    def silent_writers(self) -> tuple[str, ...]:
        """Ids of the workers that may still write to quarantined pages."""
        with self._lock:
            return tuple(sorted({entry.prefill.worker_id for entry in self._entries.values() if entry.quarantined}))

    @property
    def fenced(self) -> int:
        """Messages and notices that named a lease that was over."""
        return self._fenced

    @property
    def open_leases(self) -> int:
        """Leases that have not ended, quarantined ones included: for `Receiver.expect`, since a writer may need the
        receiver's attention to become quiet."""
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

    def _stale(self, what: object, why: str) -> StaleEpoch:
        self._fenced += 1
        return StaleEpoch(f"{what} was refused: {why}; drop this attempt")

    def _is_gone(self, peer: PeerRef) -> bool:
        return peer.incarnation <= self._gone.get(peer.worker_id, -1)

    def _revoke(self, entry: _Entry) -> LeaseChange:
        if entry.page_ids is None:
            return self._end(entry, PageAction.NONE)
        entry.quarantined = True
        return entry.change(PageAction.QUARANTINE)

    def _is_safe(self, entry: _Entry) -> bool:
        """Whether nothing of a writer that is believed dead lands any more; starts the grace when it is due."""
        if entry.grace_s is None or self._clock() < entry.permitted_at + self._fence.window_s:
            return False
        if entry.safe_at is None:
            entry.safe_at = self._fence.listened_s() + entry.grace_s
        return self._fence.listened_s() >= entry.safe_at

    def _end(self, entry: _Entry, action: PageAction) -> LeaseChange:
        del self._entries[entry.lease.epoch]
        return entry.change(action)
