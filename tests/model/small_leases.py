"""A small world of leases: one page, a few attempts of a request, and a prefill worker of one or two ranks.

Real: the lease table with its fence, and the page pool. Simulated: the writer, its writes and notices, the transport
and the clock, of which a tick is one second. Each rank writes its part of the page and then sends its part of the
notice. Writes that have failed, writes of a dead process, and writes of a process that is taken for dead arrive within
LATE seconds or never.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from kv_transfer.fence import Fence
from kv_transfer.lease import LeaseTable
from kv_transfer.lease_change import LeaseChange, PageAction
from tandem.engine.cache.page_pool import PagePool
from tandem.protocol.errors import StaleEpoch
from tandem.protocol.messages import Lease, PeerRef, RequestRef
from tests.model.checks import Broken, holder_of
from tests.model.exhaustive import Action

DURATION, WINDOW, GRACE, LATE = 2, 2, 2, 1
PAGE = 0
WRITER = PeerRef("prefill-0", 1)
_END_TICKS = DURATION + WINDOW + GRACE + 2
_NONE, _FLYING, _LANDED, _BROKEN, _LOST = range(5)


@dataclass(slots=True)
class Attempt:
    """One attempt as its writer knows it."""

    lease: Lease
    closes_at: float = -math.inf
    """The time until which the writer may begin a write; -inf before it knows the page, and once it has given up."""
    knows_page: bool = False
    writes: list[int] = field(default_factory=list)
    lands_by: list[float] = field(default_factory=list)
    notices: list[int] = field(default_factory=list)
    released: bool = False
    bounded: bool = False
    """True once the writer has been taken for dead or has died: its later writes land within LATE seconds as well."""


class SmallLeases:
    """The world; see the module's docstring."""

    def __init__(self, ranks: int, attempts: int) -> None:
        """Create the world with a group of `ranks` ranks that makes at most `attempts` attempts."""
        self._ranks, self._most_attempts = ranks, attempts
        self._now = 0.0
        fence = Fence(WINDOW, lambda _: GRACE, lambda: self._now, lambda _: None)
        self._table = LeaseTable(lambda: self._now, DURATION, fence)
        self._pool = PagePool(1, lambda: self._now)
        self._attempts: list[Attempt] = []
        self._alive, self._disowned, self._admitted = True, False, False
        self._content: set[tuple[int, int]] = set()
        """The parts of the page by epoch and rank."""

    def actions(self) -> Iterator[Action]:
        """Returns the possible actions; see `SmallWorld`."""
        yield "tick", 0, 0
        if len(self._attempts) < self._most_attempts and not self._open_attempt() and not self._disowned:
            yield "grant", 0, 0
        if self._open_attempt():
            yield "abort", 0, 0
            yield "heartbeat", 0, 0
        if self._admitted:
            yield "finish", 0, 0
        if self._alive:
            yield "kill", 0, 0
            yield ("own" if self._disowned else "disown"), 0, 0
        elif not self._disowned:
            yield "disown", 0, 0
        for number, one in enumerate(self._attempts):
            yield from self._writer_actions(number, one)
            for rank in range(self._ranks):
                if one.writes[rank] in (_FLYING, _BROKEN) and self._now <= one.lands_by[rank]:
                    yield "land", number, rank
                if one.notices[rank] == _FLYING:
                    yield "arrive", number, rank

    def _writer_actions(self, number: int, one: Attempt) -> Iterator[Action]:
        if not self._alive or one.released:
            return
        if not one.knows_page:
            yield "allocate", number, 0
        elif self._now < one.closes_at or any(state is not _NONE for state in one.writes):
            yield "prolong", number, 0
        for rank in range(self._ranks):
            if one.knows_page and self._now < one.closes_at and one.writes[rank] == _NONE:
                yield "write", number, rank
            if one.writes[rank] == _FLYING:
                yield "break", number, rank
            if one.writes[rank] == _LANDED and one.notices[rank] == _NONE:
                yield "notify", number, rank
        if _FLYING not in one.writes and not all(one.notices):
            yield "release", number, 0

    def act(self, action: Action) -> None:
        """Plays one action; see `SmallWorld`."""
        name, number, rank = action
        getattr(self, f"_{name}")(number, rank)
        self._pool.check_integrity()

    def key(self) -> Hashable:
        """Returns the state; see `SmallWorld`."""
        now = self._now
        entries = tuple(
            (
                entry.lease.epoch,
                0.0 if entry.quarantined else entry.expires_at - now,
                entry.quarantined,
                entry.page_ids,
                frozenset(entry.parts),
                max(-WINDOW, entry.exposure._permitted_at - now),
                entry.exposure._grace_s,
                entry.exposure._writer_stopped,
                entry.exposure._safe_at and max(0.0, entry.exposure._safe_at - now),
            )
            for entry in self._table._entries.values()
        )
        writers = tuple(
            (
                one.lease.epoch,
                max(0.0, one.closes_at - now),
                one.knows_page,
                tuple(one.writes),
                tuple(max(-1.0, by - now) for by in one.lands_by),
                tuple(one.notices),
                one.released,
                one.bounded,
            )
            for one in self._attempts
        )
        holder = holder_of(self._pool, PAGE)
        return entries, writers, holder, frozenset(self._content), self._alive, self._disowned, self._admitted

    def end(self) -> None:
        """Lets writes land and notices arrive, stops the writer, lets time pass; see `SmallWorld`."""
        for number, one in enumerate(self._attempts):
            for rank in range(self._ranks):
                if one.writes[rank] in (_FLYING, _BROKEN) and self._now <= one.lands_by[rank]:
                    self._land(number, rank)
                if one.notices[rank] == _FLYING:
                    self._arrive(number, rank)
            if self._alive and not one.released and not all(one.notices):
                self._release(number, 0)
        if not self._alive and not self._disowned:
            self._disown(0, 0)
        for _ in range(_END_TICKS):
            self._tick(0, 0)
        if self._admitted:
            self._finish(0, 0)
        if self._table.open_leases or holder_of(self._pool, PAGE).state != "free":
            raise Broken(f"{self._table.open_leases} leases and a page that is {holder_of(self._pool, PAGE)} are left")

    # ---- the decode worker ----

    def _open_attempt(self) -> bool:
        return bool(self._attempts) and any(
            entry.lease == self._attempts[-1].lease and not entry.quarantined for entry in self._table._entries.values()
        )

    def _tick(self, _number: int, _rank: int) -> None:
        self._now += 1
        for change in self._table.expire():
            self._apply(change)

    def _grant(self, _number: int, _rank: int) -> None:
        lease = self._table.grant(RequestRef("request", len(self._attempts) + 1), WRITER)
        if any(one.lease.epoch == lease.epoch for one in self._attempts):
            raise Broken(f"{lease} has the epoch of another lease")
        state = [_NONE] * self._ranks
        self._attempts.append(Attempt(lease, writes=list(state), lands_by=[math.inf] * self._ranks, notices=state))

    def _abort(self, _number: int, _rank: int) -> None:
        self._apply(self._table.revoke(self._attempts[-1].lease))

    def _heartbeat(self, _number: int, _rank: int) -> None:
        self._table.renew([self._attempts[-1].lease])

    def _finish(self, _number: int, _rank: int) -> None:
        self._pool.free(RequestRef("admitted", 1))
        self._admitted = False

    def _disown(self, _number: int, _rank: int) -> None:
        self._disowned = True
        for change in self._table.peer_gone(WRITER):
            self._apply(change)
        self._bound()

    def _own(self, _number: int, _rank: int) -> None:
        self._disowned = False
        self._table.peer_back(WRITER)

    def _apply(self, change: LeaseChange) -> None:
        lease = change.lease
        if change.action is PageAction.QUARANTINE:
            self._pool.quarantine(lease)
        elif change.action is PageAction.ADMIT:
            if self._content != {(lease.epoch, rank) for rank in range(self._ranks)}:
                raise Broken(f"{lease} is admitted with {self._content}")
            self._pool.adopt(lease, RequestRef("admitted", 1))
            self._admitted = True
        elif change.action is PageAction.FREE:
            quarantined = holder_of(self._pool, PAGE).state == "quarantined"
            (self._pool.free_quarantined if quarantined else self._pool.free_lease)(lease)

    # ---- the writer ----

    def _allocate(self, number: int, _rank: int) -> None:
        one = self._attempts[number]
        try:
            pages = self._table.permit(one.lease, WRITER)
            if pages is None:
                if not self._pool.unreserved:
                    return  # the decode worker had reserved it, and waits until a quarantine has ended
                self._table.advertise(one.lease, WRITER, self._pool.advertise(one.lease, 1, from_reserved=False))
                self._content.clear()
        except StaleEpoch:
            one.released = True
            return
        one.knows_page, one.closes_at = True, self._now + WINDOW

    def _prolong(self, number: int, _rank: int) -> None:
        one = self._attempts[number]
        if self._table.prolong([one.lease], WRITER):
            one.closes_at = -math.inf
        else:
            one.closes_at = self._now + WINDOW

    def _write(self, number: int, rank: int) -> None:
        one = self._attempts[number]
        one.writes[rank] = _FLYING
        one.lands_by[rank] = self._now + LATE if one.bounded else math.inf

    def _land(self, number: int, rank: int) -> None:
        one = self._attempts[number]
        holder = holder_of(self._pool, PAGE)
        expected = RequestRef(one.lease.request_id, one.lease.attempt)
        if holder.ref != expected or holder.state not in ("advertised", "quarantined"):
            raise Broken(f"a write of {one.lease} lands in a page that is {holder}")
        self._content.add((one.lease.epoch, rank))
        one.writes[rank] = _LANDED if one.writes[rank] == _FLYING else _LOST

    def _break(self, number: int, rank: int) -> None:
        one = self._attempts[number]
        one.writes[rank], one.lands_by[rank] = _BROKEN, min(one.lands_by[rank], self._now + LATE)

    def _notify(self, number: int, rank: int) -> None:
        self._attempts[number].notices[rank] = _FLYING

    def _arrive(self, number: int, rank: int) -> None:
        one = self._attempts[number]
        one.notices[rank] = _LANDED
        try:
            change = self._table.complete(one.lease, WRITER, rank, self._ranks)
        except StaleEpoch:
            return
        if change is not None:
            self._apply(change)

    def _release(self, number: int, _rank: int) -> None:
        one = self._attempts[number]
        one.released, one.closes_at = True, -math.inf
        try:
            changes = self._table.release(one.lease, WRITER, in_doubt=_BROKEN in one.writes or _LOST in one.writes)
        except StaleEpoch:
            return
        for change in changes:
            self._apply(change)

    def _kill(self, _number: int, _rank: int) -> None:
        self._alive = False
        self._bound()

    def _bound(self) -> None:
        """Limits the time in which writes in flight land."""
        for one in self._attempts:
            one.lands_by, one.bounded = [min(by, self._now + LATE) for by in one.lands_by], True
