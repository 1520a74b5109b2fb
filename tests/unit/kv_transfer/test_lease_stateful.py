"""Random lives of many leases: no page is freed while its writer may still write, and every lease ends once."""

import math
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_transfer.fence import Fence
from kv_transfer.lease import LeaseTable
from kv_transfer.lease_change import LeaseChange, PageAction
from tandem.protocol.errors import StaleEpoch, Unavailable
from tandem.protocol.messages import Lease, PeerRef, RequestRef
from tests.soak import examples

DURATION, WINDOW, GRACE = 10.0, 2.0, 4.0
REQUESTS = st.integers(0, 3).map(lambda i: f"r{i}")
WRITERS = st.integers(0, 1).map(lambda i: f"prefill-{i}")
PICK = st.integers(0, 10**6)


@dataclass
class Seen:
    """The test's own view of a lease: a writer writes from the moment it receives pages."""

    writer: PeerRef
    writing: bool = False
    permitted_at: float = 0.0
    pages: tuple[int, ...] = ()
    quarantined: bool = False
    endings: int = 0


class Leases(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        fence = Fence(WINDOW, lambda peer: GRACE, lambda: self.now)
        self.table: LeaseTable = LeaseTable(lambda: self.now, DURATION, fence)
        self.seen: dict[Lease, Seen] = {}
        self.incarnation = {"prefill-0": 1, "prefill-1": 1}
        self.died: dict[PeerRef, float] = {}
        self.known_dead: dict[PeerRef, float] = {}
        self.attempt = 0
        self.next_page = 0

    def apply(self, change: LeaseChange, *, quiet: bool = False) -> None:
        seen = self.seen[change.lease]
        assert (change.prefill, change.page_ids) == (seen.writer, seen.pages)
        if change.action is PageAction.QUARANTINE:
            assert seen.pages
            assert not seen.quarantined
            assert not seen.endings
            seen.quarantined = True
            return
        seen.endings += 1
        assert seen.endings == 1
        if change.action is PageAction.FREE:
            known, forbidden = self.known_dead.get(seen.writer, math.inf), seen.permitted_at + WINDOW
            long_dead = self.now >= max(known, forbidden) + GRACE
            assert quiet or long_dead
        if change.action is PageAction.ADMIT:
            assert quiet
            assert not seen.quarantined
        if change.action is PageAction.NONE:
            assert not seen.pages

    def pick(self, number: int) -> Lease | None:
        leases = list(self.seen)
        return leases[-1 - number % min(len(leases), 8)] if leases else None

    @rule(request=REQUESTS, worker=WRITERS, allocate_pages=st.booleans())
    def grant(self, request: str, worker: str, allocate_pages: bool) -> None:
        self.attempt += 1
        writer = PeerRef(worker, self.incarnation[worker])
        try:
            lease = self.table.grant(RequestRef(request, self.attempt), writer)
        except Unavailable:
            assert writer in self.known_dead
            return
        assert lease.epoch > max((seen.epoch for seen in self.seen), default=0)
        self.seen[lease] = Seen(writer)
        if allocate_pages:
            self.allocate_pages(0)

    @rule(number=PICK)
    def allocate_pages(self, number: int) -> None:
        lease = self.pick(number)
        if lease is None or self.seen[lease].writer in self.died:
            return
        seen = self.seen[lease]
        try:
            pages = self.table.permit(lease, seen.writer)
            if pages is None:
                pages = (self.next_page, self.next_page + 1)
                self.table.advertise(lease, seen.writer, pages)
                self.next_page += 2
                seen.pages, seen.writing = pages, True
            seen.permitted_at = self.now
        except StaleEpoch:
            assert seen.quarantined or seen.endings

    @rule(numbers=st.lists(PICK, max_size=4), worker=WRITERS)
    def renew(self, numbers: list[int], worker: str) -> None:
        """Sends one message, of which some leases may be over, revoked or another writer's."""
        writer = PeerRef(worker, self.incarnation[worker])
        named = [lease for number in numbers if (lease := self.pick(number)) is not None]
        if writer in self.died:
            return
        over = self.table.prolong(named, writer)
        for lease in named:
            seen = self.seen[lease]
            goes_on = seen.writer == writer and bool(seen.pages) and not seen.quarantined and not seen.endings
            assert goes_on is (lease not in over)
            if goes_on:
                seen.permitted_at = self.now

    @rule(number=PICK)
    def notify(self, number: int) -> None:
        lease = self.pick(number)
        if lease is None or not self.seen[lease].writing:
            return
        self.seen[lease].writing = False
        self.end_by_writer(lease, notice=True)

    @rule(number=PICK)
    def release_by_writer(self, number: int) -> None:
        lease = self.pick(number)
        if lease is None or self.seen[lease].writer in self.died or self.delivered(lease):
            return
        self.seen[lease].writing = False
        self.end_by_writer(lease, notice=False)

    def delivered(self, lease: Lease) -> bool:
        return bool(self.seen[lease].pages) and not self.seen[lease].writing

    def end_by_writer(self, lease: Lease, *, notice: bool) -> None:
        seen = self.seen[lease]
        try:
            if notice:
                change = self.table.complete(lease, seen.writer)
            else:
                (change,) = self.table.release(lease, seen.writer)
        except StaleEpoch:
            assert seen.endings
        else:
            self.apply(change, quiet=True)

    @rule(number=PICK)
    def repeat_the_last_word(self, number: int) -> None:
        lease = self.pick(number)
        if lease is not None and self.delivered(lease):
            self.end_by_writer(lease, notice=bool(number % 2))

    @rule(number=PICK)
    def abort(self, number: int) -> None:
        lease = self.pick(number)
        if lease is None:
            return
        try:
            change = self.table.revoke(lease)
        except StaleEpoch:
            assert self.seen[lease].quarantined or self.seen[lease].endings
        else:
            self.apply(change)

    @rule(worker=WRITERS, seen=st.booleans())
    def die(self, worker: str, seen: bool) -> None:
        """Ends the process; the death is reported now or later, and its writes may land for a while."""
        self.died.setdefault(PeerRef(worker, self.incarnation[worker]), self.now)
        if seen:
            self.learn_of_death(worker, restart=True)

    @rule(worker=WRITERS, restart=st.booleans())
    def learn_of_death(self, worker: str, restart: bool) -> None:
        peer = PeerRef(worker, self.incarnation[worker])
        if peer not in self.died:
            return
        self.known_dead.setdefault(peer, self.now)
        for change in self.table.peer_gone(peer):
            self.apply(change)
        if restart:
            self.incarnation[worker] += 1

    @rule(seconds=st.sampled_from([0.5, 3.0, 5.0, 11.0]), beat=st.booleans())
    def wait(self, seconds: float, beat: bool) -> None:
        self.now += seconds
        if beat:
            for lease in self.table.renew(list(self.seen)):
                assert self.seen[lease].quarantined or self.seen[lease].endings
        for change in self.table.expire():
            self.apply(change)

    @invariant()
    def counts_agree(self) -> None:
        alive = [seen for seen in self.seen.values() if not seen.endings]
        assert self.table.open_leases == len(alive)

    def teardown(self) -> None:
        """Ends all writers: then all leases end."""
        for worker, incarnation in self.incarnation.items():
            peer = PeerRef(worker, incarnation)
            self.known_dead.setdefault(peer, self.now)
            for change in self.table.peer_gone(peer):
                self.apply(change)
        for seconds in (WINDOW, GRACE):
            self.now += seconds
            for change in self.table.expire():
                self.apply(change)
        assert all(seen.endings == 1 for seen in self.seen.values())


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=examples(25), stateful_step_count=40)
