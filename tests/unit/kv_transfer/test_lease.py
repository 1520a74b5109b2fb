"""Every interleaving in the table of kv_transfer/lease.py."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kv_transfer.fence import Fence
from kv_transfer.lease import LeaseTable
from kv_transfer.lease_change import PageAction
from tandem.capacity.simulation.clock import VirtualClock
from tandem.protocol.errors import StaleEpoch, Unavailable
from tandem.protocol.messages import Lease, PeerRef, RequestRef

WRITER = PeerRef("prefill-0", 3)
DURATION, WINDOW, GRACE = 10.0, 3.0, 4.0


class Desk:
    """A table, its clock, and one request `r` granted to WRITER."""

    def __init__(self) -> None:
        self.clock, self.listened = VirtualClock(100.0), VirtualClock(100.0)
        self.listened.now = 7.0
        self.seen: dict[PeerRef, bool] = {}
        self.grace_s = GRACE
        fence = Fence(WINDOW, lambda peer: self.grace_s, self.listened, self.seen.get)
        self.table: LeaseTable = LeaseTable(self.clock, DURATION, fence)
        self.lease = self.table.grant(RequestRef("r", 1), WRITER)

    def advertise(self) -> Lease:
        self.table.advertise(self.lease, WRITER, [5, 7])
        return self.lease

    def pass_by(self, seconds: float) -> None:
        """Passes time while this worker's transport polls."""
        self.clock.now += seconds
        self.listened.now += seconds

    def stale(self, call: Callable[[], object]) -> None:
        before = self.table.fenced
        with pytest.raises(StaleEpoch, match=r"the lease of request \w+, attempt \d+, was refused: "):
            call()
        assert self.table.fenced == before + 1


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_the_straight_way(desk: Desk) -> None:
    assert desk.table.open_leases == 1
    assert desk.table.permit(desk.lease, WRITER) is None
    desk.advertise()
    assert desk.table.permit(desk.lease, WRITER) == (5, 7)
    change = desk.table.complete(desk.lease, WRITER)
    assert (change.action, change.page_ids) == (PageAction.ADMIT, (5, 7))
    assert desk.table.open_leases == 0
    assert desk.table.fenced == 0


def test_a_transfer_of_several_parts_ends_with_the_last_of_them(desk: Desk) -> None:
    """Each rank of a group sends its part of the notice; a repeated part does not count twice."""
    lease = desk.advertise()
    assert desk.table.complete(lease, WRITER, 1, 3) is None
    assert desk.table.complete(lease, WRITER, 1, 3) is None
    assert desk.table.complete(lease, WRITER, 0, 3) is None
    change = desk.table.complete(lease, WRITER, 2, 3)
    assert change is not None
    assert (change.action, change.page_ids) == (PageAction.ADMIT, (5, 7))


def test_epochs_grow_with_each_grant(desk: Desk) -> None:
    epochs = [desk.table.grant(RequestRef(f"q{i}", 1), WRITER).epoch for i in range(4)]
    assert epochs == sorted({desk.lease.epoch, *epochs})[1:]


def revoke(desk: Desk) -> None:
    assert desk.table.revoke(desk.lease).action is PageAction.QUARANTINE


def expire(desk: Desk) -> None:
    desk.clock.now += DURATION
    (change,) = desk.table.expire()
    assert (change.action, change.page_ids) == (PageAction.QUARANTINE, (5, 7))


def die(desk: Desk) -> None:
    (change,) = desk.table.peer_gone(WRITER)
    assert change.action is PageAction.QUARANTINE


REVOCATIONS = [revoke, expire, die]


def freed_after_the_grace(desk: Desk) -> None:
    """Time in which this worker's transport does not poll does not count."""
    desk.clock.now += 10 * GRACE
    desk.pass_by(GRACE - 0.01)
    assert desk.table.expire() == ()
    desk.pass_by(0.01)
    (change,) = desk.table.expire()
    assert (change.lease, change.action, change.page_ids) == (desk.lease, PageAction.FREE, (5, 7))
    assert desk.table.open_leases == 0


@pytest.mark.parametrize("alive", [None, True, False])
def test_after_a_release_in_doubt_pages_stay_apart_for_the_grace_whether_the_writer_lives_or_not(
    desk: Desk, alive: bool | None
) -> None:
    lease = desk.advertise()
    if alive is not None:
        desk.seen[WRITER] = alive
    (change,) = desk.table.release(lease, WRITER, in_doubt=True)
    assert (change.action, change.page_ids) == (PageAction.QUARANTINE, (5, 7))
    desk.stale(lambda: desk.table.permit(lease, WRITER))
    desk.pass_by(0.5)
    assert desk.table.release(lease, WRITER, in_doubt=True) == (), "said twice, as its answer was lost"
    assert desk.table.peer_gone(WRITER) == ()
    desk.listened.now -= 0.5
    freed_after_the_grace(desk)
    desk.stale(lambda: desk.table.release(lease, WRITER, in_doubt=True))


@pytest.mark.parametrize("over", [revoke, expire, die])
def test_a_release_in_doubt_after_a_revocation_begins_the_grace(desk: Desk, over: Callable[[Desk], None]) -> None:
    desk.seen[WRITER] = True
    lease = desk.advertise()
    over(desk)
    desk.pass_by(10 * GRACE)
    assert desk.table.expire() == ()
    assert desk.table.release(lease, WRITER, in_doubt=True) == ()
    freed_after_the_grace(desk)


def test_a_notice_ends_the_doubt(desk: Desk) -> None:
    lease = desk.advertise()
    desk.table.release(lease, WRITER, in_doubt=True)
    assert desk.table.complete(lease, WRITER).action is PageAction.FREE


def test_a_promise_is_never_in_doubt(desk: Desk) -> None:
    (change,) = desk.table.release(desk.lease, WRITER, in_doubt=True)
    assert change.action is PageAction.NONE


@pytest.mark.parametrize("over", REVOCATIONS)
def test_once_revoked_every_late_word_is_fenced_and_no_page_is_freed(desk: Desk, over: Callable[[Desk], None]) -> None:
    lease = desk.advertise()
    over(desk)
    desk.stale(lambda: desk.table.permit(lease, WRITER))
    desk.stale(lambda: desk.table.advertise(lease, WRITER, [1]))
    desk.stale(lambda: desk.table.revoke(lease))
    assert desk.table.renew([lease]) == (lease,)
    assert desk.table.expire() == ()


@pytest.mark.parametrize("over", REVOCATIONS)
def test_after_a_revocation_a_late_notice_proves_quiet(desk: Desk, over: Callable[[Desk], None]) -> None:
    lease = desk.advertise()
    over(desk)
    change = desk.table.complete(lease, WRITER)
    assert (change.action, change.page_ids) == (PageAction.FREE, (5, 7))
    assert desk.table.fenced == 1
    desk.stale(lambda: desk.table.complete(lease, WRITER))
    desk.stale(lambda: desk.table.release(lease, WRITER))


@pytest.mark.parametrize("over", REVOCATIONS)
def test_after_a_revocation_a_release_frees(desk: Desk, over: Callable[[Desk], None]) -> None:
    lease = desk.advertise()
    over(desk)
    assert [change.action for change in desk.table.release(lease, WRITER)] == [PageAction.FREE]
    desk.stale(lambda: desk.table.complete(lease, WRITER))
    desk.stale(lambda: desk.table.release(lease, WRITER))


@pytest.mark.parametrize("over", [lambda _desk: None, *REVOCATIONS])
def test_a_delivery_whose_notice_was_lost_ends_the_lease(desk: Desk, over: Callable[[Desk], None]) -> None:
    lease = desk.advertise()
    over(desk)
    was_open = desk.table.renew([lease]) == ()
    assert len(desk.table.delivered([lease], WRITER)) == was_open
    assert desk.table.delivered([lease], WRITER) == ()
    freed_after_the_grace(desk)
    assert desk.table.delivered([lease], WRITER) == ()
    assert desk.table.fenced == 0
    desk.stale(lambda: desk.table.complete(lease, WRITER))


def test_only_the_writer_s_own_open_leases_count_as_delivered(desk: Desk) -> None:
    lease = desk.advertise()
    stranger = PeerRef("somebody", 1)
    assert desk.table.delivered([lease], stranger) == ()
    assert desk.table.delivered([replace(lease, attempt=7)], WRITER) == ()
    assert desk.table.complete(lease, WRITER).action is PageAction.ADMIT
    assert desk.table.delivered([lease], WRITER) == ()


@pytest.mark.parametrize("over", [revoke, expire])
def test_a_quarantine_has_no_deadline_while_its_writer_may_live(desk: Desk, over: Callable[[Desk], None]) -> None:
    lease = desk.advertise()
    over(desk)
    desk.clock.now += 1e6
    assert lease not in [change.lease for change in desk.table.expire()]


@pytest.mark.parametrize("over", REVOCATIONS)
def test_a_dead_writer_s_quarantine_ends_a_bounded_time_after_the_death(
    desk: Desk, over: Callable[[Desk], None]
) -> None:
    desk.advertise()
    desk.pass_by(WINDOW)
    over(desk)
    desk.pass_by(1.0)
    desk.table.peer_gone(WRITER)
    desk.table.peer_gone(WRITER)
    since_death = 1.0 if over is die else 0.0
    desk.pass_by(GRACE - since_death - 0.01)
    assert desk.table.expire() == ()
    desk.pass_by(0.01)
    (change,) = [c for c in desk.table.expire() if c.lease == desk.lease]
    assert (change.action, change.page_ids) == (PageAction.FREE, (5, 7))
    assert desk.lease not in [c.lease for c in desk.table.expire()]


def test_the_grace_of_a_writer_that_may_live_begins_when_it_may_begin_no_write_any_more(desk: Desk) -> None:
    lease = desk.advertise()
    desk.pass_by(2 * WINDOW)
    assert desk.table.permit(lease, WRITER) == (5, 7)
    desk.pass_by(1.0)
    die(desk)
    desk.pass_by(WINDOW - 1.0 - 0.01)
    assert desk.table.expire() == ()
    desk.pass_by(0.01)
    assert desk.table.expire() == ()
    desk.pass_by(GRACE - 0.01)
    assert desk.table.expire() == ()
    desk.pass_by(0.01)
    assert [change.action for change in desk.table.expire()] == [PageAction.FREE]


def test_pages_that_were_just_advertised_may_be_written_for_a_window(desk: Desk) -> None:
    desk.advertise()
    die(desk)
    desk.pass_by(WINDOW + GRACE)
    assert desk.table.expire() == (), "the grace begins when it is seen that the window is over"
    desk.pass_by(GRACE)
    assert [change.action for change in desk.table.expire()] == [PageAction.FREE]


def test_a_grace_counts_only_time_in_which_the_transport_listened(desk: Desk) -> None:
    desk.advertise()
    desk.pass_by(WINDOW)
    die(desk)
    desk.clock.now += 1e6
    assert desk.table.expire() == ()
    desk.listened.now += GRACE
    assert [change.action for change in desk.table.expire()] == [PageAction.FREE]


def test_nothing_is_safe_from_a_writer_that_is_seen_to_live_however_long_it_stands_still(desk: Desk) -> None:
    desk.advertise()
    desk.seen[WRITER] = True
    desk.table.peer_gone(WRITER)
    desk.pass_by(100 * (WINDOW + GRACE))
    assert desk.table.expire() == ()
    desk.seen[WRITER] = False
    desk.table.expire()
    desk.pass_by(GRACE - 0.1)
    assert desk.table.expire() == ()
    desk.pass_by(0.2)
    (change,) = desk.table.expire()
    assert (change.action, change.page_ids) == (PageAction.FREE, (5, 7))


def test_a_writer_that_is_seen_to_be_dead_has_no_permission_to_wait_for(desk: Desk) -> None:
    desk.advertise()
    desk.seen[WRITER] = False
    desk.table.peer_gone(WRITER)
    desk.pass_by(GRACE - 0.1)
    assert desk.table.expire() == ()
    desk.pass_by(0.2)
    (change,) = desk.table.expire()
    assert change.action is PageAction.FREE


def test_a_sign_of_life_amid_the_grace_begins_it_anew(desk: Desk) -> None:
    """Writes that it began while it lived may land for a whole grace period after its death."""
    desk.advertise()
    desk.seen[WRITER] = False
    desk.table.peer_gone(WRITER)
    desk.pass_by(GRACE - 0.1)
    assert desk.table.expire() == ()
    desk.seen[WRITER] = True
    assert desk.table.expire() == ()
    desk.pass_by(10 * GRACE)
    desk.seen[WRITER] = False
    assert desk.table.expire() == ()
    desk.pass_by(GRACE - 0.1)
    assert desk.table.expire() == ()
    desk.pass_by(0.1)
    assert [change.action for change in desk.table.expire()] == [PageAction.FREE]


def test_the_grace_of_a_writer_is_what_it_was_when_it_was_first_believed_dead(desk: Desk) -> None:
    """Where it ran may be forgotten since, and a writer on another host has the longer grace."""
    desk.advertise()
    desk.seen[WRITER] = True
    desk.table.peer_gone(WRITER)
    desk.grace_s = 0.0
    desk.table.peer_gone(WRITER)
    desk.seen[WRITER] = False
    assert desk.table.expire() == ()
    freed_after_the_grace(desk)


def test_writers_that_may_still_write_to_quarantined_pages_are_named_once(desk: Desk) -> None:
    assert desk.table.silent_writers() == ()
    desk.advertise()
    later = desk.table.grant(RequestRef("s", 1), PeerRef("prefill-0", 4))
    desk.table.advertise(later, PeerRef("prefill-0", 4), [9])
    other = desk.table.grant(RequestRef("t", 1), PeerRef("prefill-1", 1))
    desk.table.advertise(other, PeerRef("prefill-1", 1), [11])
    assert desk.table.silent_writers() == ()
    desk.table.revoke(desk.lease)
    desk.table.revoke(later)
    assert desk.table.silent_writers() == ("prefill-0",)
    desk.table.complete(desk.lease, WRITER)
    desk.table.release(later, PeerRef("prefill-0", 4))
    assert desk.table.silent_writers() == ()


def test_each_writer_is_looked_at_once_a_round() -> None:
    looks: list[PeerRef] = []

    def poll(peer: PeerRef) -> bool:
        looks.append(peer)
        return True

    table = LeaseTable(lambda: 0.0, DURATION, Fence(WINDOW, lambda peer: GRACE, lambda: 0.0, poll))
    for number in range(5):
        table.advertise(table.grant(RequestRef(f"r{number}", 1), WRITER), WRITER, [number])
    table.peer_gone(WRITER)
    table.expire()
    assert looks == [WRITER, WRITER]


def test_a_renewal_prolongs_what_is_being_written_and_names_the_rest(desk: Desk) -> None:
    other = PeerRef("prefill-1", 1)
    promise = desk.table.grant(RequestRef("promise", 1), WRITER)
    revoked = desk.table.grant(RequestRef("revoked", 1), WRITER)
    desk.table.advertise(revoked, WRITER, [1])
    desk.table.revoke(revoked)
    foreign = desk.table.grant(RequestRef("foreign", 1), other)
    desk.table.advertise(foreign, other, [2])
    unknown = replace(desk.advertise(), attempt=2)
    named = (desk.lease, promise, revoked, foreign, unknown)
    assert desk.table.prolong(named, WRITER) == (promise, revoked, foreign, unknown)
    assert desk.table.fenced == 0


def test_a_renewal_keeps_pages_from_being_safe_for_a_window_more(desk: Desk) -> None:
    desk.advertise()
    desk.pass_by(WINDOW - 0.1)
    assert desk.table.prolong([desk.lease], WRITER) == ()
    desk.table.peer_gone(WRITER)
    assert desk.table.prolong([desk.lease], WRITER) == (desk.lease,)
    desk.pass_by(WINDOW - 0.1)
    desk.table.expire()
    desk.pass_by(GRACE)
    assert desk.table.expire() == ()
    desk.pass_by(GRACE + 0.2)
    (change,) = desk.table.expire()
    assert change.action is PageAction.FREE


def test_a_renewal_is_no_heartbeat(desk: Desk) -> None:
    """Only its router decides that its request is still wanted."""
    desk.advertise()
    desk.pass_by(DURATION - 0.1)
    desk.table.prolong([desk.lease], WRITER)
    desk.pass_by(0.2)
    (change,) = desk.table.expire()
    assert change.action is PageAction.QUARANTINE


def test_a_writer_that_was_taken_for_dead_is_welcome_again_but_to_none_of_its_old_leases(desk: Desk) -> None:
    lease = desk.advertise()
    die(desk)
    desk.table.peer_back(PeerRef(WRITER.worker_id, WRITER.incarnation - 1))
    with pytest.raises(Unavailable):
        desk.table.grant(RequestRef("s", 1), WRITER)
    desk.table.peer_back(WRITER)
    new = desk.table.grant(RequestRef("s", 1), WRITER)
    desk.table.advertise(new, WRITER, [9])
    desk.stale(lambda: desk.table.permit(lease, WRITER))
    desk.pass_by(WINDOW)
    assert desk.table.expire() == ()
    desk.pass_by(GRACE)
    assert [(change.lease, change.action) for change in desk.table.expire()] == [(lease, PageAction.FREE)]
    with pytest.raises(Unavailable):
        desk.table.grant(RequestRef("t", 1), PeerRef(WRITER.worker_id, WRITER.incarnation - 1))


def test_a_lease_that_is_named_twice_was_delivered_once(desk: Desk) -> None:
    lease = desk.advertise()
    assert [change.action for change in desk.table.delivered([lease, lease], WRITER)] == [PageAction.QUARANTINE]
    freed_after_the_grace(desk)


def test_a_lease_revoked_after_its_writer_died_is_quarantined_too(desk: Desk) -> None:
    """The death of an earlier incarnation says nothing about a later one."""
    desk.advertise()
    assert desk.table.peer_gone(PeerRef(WRITER.worker_id, WRITER.incarnation - 1)) == ()
    assert desk.table.revoke(desk.lease).action is PageAction.QUARANTINE
    desk.clock.now += GRACE + 1
    assert desk.table.expire() == ()


@pytest.mark.parametrize("end", ["revoke", "expire", "release", "die"])
def test_a_granted_lease_ends_at_once_since_no_peer_could_write(desk: Desk, end: str) -> None:
    match end:
        case "revoke":
            change = desk.table.revoke(desk.lease)
        case "expire":
            desk.clock.now += DURATION
            (change,) = desk.table.expire()
        case "release":
            (change,) = desk.table.release(desk.lease, WRITER)
        case _:
            (change,) = desk.table.peer_gone(WRITER)
    assert (change.action, change.page_ids) == (PageAction.NONE, ())
    for call in (desk.table.permit, desk.table.complete, desk.table.release):
        desk.stale(lambda call=call: call(desk.lease, WRITER))
    desk.stale(lambda: desk.table.advertise(desk.lease, WRITER, [1]))


def test_release_without_revocation_ends_the_lease(desk: Desk) -> None:
    lease = desk.advertise()
    assert [change.action for change in desk.table.release(lease, WRITER)] == [PageAction.FREE]
    desk.stale(lambda: desk.table.complete(lease, WRITER))
    desk.stale(lambda: desk.table.revoke(lease))


def test_nothing_touches_a_settled_lease(desk: Desk) -> None:
    lease = desk.advertise()
    desk.table.complete(lease, WRITER)
    desk.stale(lambda: desk.table.complete(lease, WRITER))
    desk.stale(lambda: desk.table.release(lease, WRITER))
    desk.stale(lambda: desk.table.revoke(lease))
    assert desk.table.peer_gone(WRITER) == ()
    desk.clock.now += 1e6
    assert desk.table.expire() == ()


def test_heartbeats_keep_a_lease_alive(desk: Desk) -> None:
    lost = Lease("r", 1, 99)
    for _ in range(5):
        desk.clock.now += DURATION - 0.5
        assert desk.table.expire() == ()
        assert desk.table.renew([desk.lease, lost]) == (lost,)
    desk.clock.now += DURATION
    assert [change.lease for change in desk.table.expire()] == [desk.lease]


@pytest.mark.parametrize(
    "stranger", [PeerRef("prefill-1", 3), PeerRef("prefill-0", 2), PeerRef("prefill-0", 4)], ids=str
)
def test_only_its_writer_may_use_a_lease(desk: Desk, stranger: PeerRef) -> None:
    desk.stale(lambda: desk.table.advertise(desk.lease, stranger, [1]))
    lease = desk.advertise()
    desk.stale(lambda: desk.table.permit(lease, stranger))
    desk.stale(lambda: desk.table.complete(lease, stranger))
    desk.stale(lambda: desk.table.release(lease, stranger))
    assert desk.table.complete(lease, WRITER).action is PageAction.ADMIT


@pytest.mark.parametrize("wrong", [Lease("r", 2, 1), Lease("q", 1, 1), Lease("r", 1, 2), Lease("r", 1, 0)], ids=str)
def test_every_part_of_a_lease_counts(desk: Desk, wrong: Lease) -> None:
    desk.advertise()
    desk.stale(lambda: desk.table.complete(wrong, WRITER))
    desk.stale(lambda: desk.table.release(wrong, WRITER))
    desk.stale(lambda: desk.table.revoke(wrong))
    assert desk.table.renew([wrong]) == (wrong,)


def test_a_notice_before_any_pages_is_fenced(desk: Desk) -> None:
    desk.stale(lambda: desk.table.complete(desk.lease, WRITER))
    desk.advertise()
    assert desk.table.complete(desk.lease, WRITER).action is PageAction.ADMIT


def test_a_dead_writer_gets_no_lease_but_its_next_incarnation_does(desk: Desk) -> None:
    desk.table.peer_gone(WRITER)
    with pytest.raises(Unavailable, match="prefill-0"):
        desk.table.grant(RequestRef("s", 1), WRITER)
    desk.table.grant(RequestRef("s", 1), PeerRef(WRITER.worker_id, WRITER.incarnation + 1))


def test_pages_are_advertised_once(desk: Desk) -> None:
    desk.advertise()
    with pytest.raises(ValueError, match="already"):
        desk.table.advertise(desk.lease, WRITER, [9])
    assert desk.table.permit(desk.lease, WRITER) == (5, 7)


def test_one_request_s_leases_do_not_touch_each_other(desk: Desk) -> None:
    other = desk.table.grant(RequestRef("r", 1), WRITER)
    assert desk.table.revoke(other).action is PageAction.NONE
    desk.advertise()
    assert desk.table.complete(desk.lease, WRITER).action is PageAction.ADMIT
