"""The decode half with hand-made arrivals: who joins, what grows, who leaves, and that the pool stays sound."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from decode_worker.admission import DecodeAdmission
from decode_worker.scheduler import DecodeScheduler
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.protocol.errors import InvalidArgument, ResourceExhausted, StaleEpoch, Unavailable
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.lifecycle.events import LifecycleEvent
from tandem.protocol.messages import (
    FinishReason,
    Lease,
    PageChecksum,
    PeerRef,
    RequestRef,
    Reservation,
    RoutedEvent,
    RoutedTokens,
    SamplingParams,
    StepTokens,
    TransferNotice,
    hash_token_ids,
)
from tandem.settings.worker import WorkerSettings
from tests.fake_engine import FACTS, PAGE_TOKENS
from tests.unit.decode_worker.step_events import events_of

P = PeerRef("prefill-0", 1)
FIRST = 99


class House:
    """A decode half over a pool, with a clock that stands still until it is moved."""

    def __init__(self, pages: int = 64, batch: int = 4, max_pages: int | None = None, checks: Any = None) -> None:
        self.pool = PagePool(pages)
        self.now = 0.0
        self.expected = 0
        self.far = False
        self.woken = 0
        self.events: list[RoutedEvent] = []
        self.prompts: dict[Lease, tuple[int, ...]] = {}
        self.skipped: dict[Lease, int] = {}
        self.admission = DecodeAdmission(
            config=WorkerSettings(kv_lease_s=5.0, quarantine_s=1.0, write_window_s=0.0, kv_transfer_deadline_s=3.0),
            me=PeerRef("decode-0", 1),
            cache=PrefixCache(self.pool, KvPages(PAGE_TOKENS)),
            model=FACTS,
            clock=lambda: self.now,
            expect=self._expect,
            emit=self.events.append,
            wake=self._wake,
            transport_poll_s=lambda: self.now,
            same_host=lambda peer: not self.far,
            checks=checks,
        )
        self.admission.limit(max_pages)
        self.scheduler = DecodeScheduler(
            requests=self.admission.requests,
            lock=self.admission.lock,
            model=FACTS,
            kv=KvPages(PAGE_TOKENS),
            max_batch_requests=batch,
        )

    def _expect(self, leases: int) -> None:
        self.expected = leases

    def _wake(self) -> None:
        self.woken += 1

    def reserve(
        self,
        name: str,
        tokens: int = 5,
        attempt: int = 1,
        router: str = "r",
        *,
        gap_target_s: float = math.inf,
        adapter: str = "",
        **sampling: int,
    ) -> Lease:
        prompt = tuple(range(3, 3 + tokens))
        params = SamplingParams(**({"max_tokens": 6} | sampling))  # type: ignore[arg-type]
        # Under a salt of its own: no request of another name has anything it could use.
        granted = self.admission.reserve(
            Reservation(
                router,
                RequestRef(name, attempt),
                prompt,
                params,
                P,
                cache_salt=name,
                gap_target_s=gap_target_s,
                adapter=adapter,
            )
        )
        self.prompts[granted.lease] = prompt
        self.skipped[granted.lease] = granted.held_tokens // PAGE_TOKENS
        return granted.lease

    def allotted(self, name: str, gap_target_s: float) -> Lease:
        lease = self.reserve(name, gap_target_s=gap_target_s)
        self.allocate_pages(lease)
        return lease

    def allocate_pages(self, lease: Lease) -> list[int]:
        return list(self.admission.allocate_pages(lease, -(-len(self.prompts[lease]) // PAGE_TOKENS), P))

    def deliver(self, lease: Lease, **changes: object) -> None:
        prompt = self.prompts[lease]
        notice = {
            "lease": lease, "prefill": P, "token_hash": hash_token_ids(prompt), "pages": -(-len(prompt) // PAGE_TOKENS),
            "first_token_id": FIRST, "next_draw": 1, "skipped": self.skipped[lease],
        }  # fmt: skip
        self.admission.notice(TransferNotice(**(notice | changes)))  # type: ignore[arg-type]

    def arrive(self, name: str, router: str = "r", **reservation: int) -> Lease:
        lease = self.reserve(name, router=router, **reservation)
        self.allocate_pages(lease)
        self.deliver(lease)
        return lease

    def abort(self, name: str, attempt: int = 1) -> None:
        self.admission.abort("r", [RequestRef(name, attempt)])

    def assert_empty(self) -> None:
        counts = self.pool.counts()
        assert (counts.free + counts.cached, counts.reserved) == (counts.total, 0)
        self.pool.check_integrity()
        assert self.admission.open_requests == 0
        assert self.admission.open_leases == self.expected == 0


def test_the_answer_grows_from_the_promise_and_its_pages_are_free_at_the_end() -> None:
    house = House(pages=4)
    house.arrive("q", tokens=5, max_tokens=10)  # 14 positions: the whole pool
    assert house.pool.counts().reserved == 2
    events = []
    for index in range(1, 10):
        (row,) = house.scheduler.schedule(16)
        assert row.start == 5 + index - 1
        assert row.token_ids == ((FIRST,) if index == 1 else (100 + index - 1,))
        assert row.draw is not None
        assert row.draw.index == index
        assert row.start < len(row.page_ids) * PAGE_TOKENS
        house.pool.check_integrity()
        events += [request_event.event for request_event in events_of(house.scheduler.apply([100 + index]))]
    assert [event.first_index for event in events] == list(range(1, 10))
    assert [stamp.event for stamp in events[0].event_times] == [
        LifecycleEvent.NOTICE_SEEN,
        LifecycleEvent.DECODE_ADMITTED,
        LifecycleEvent.DECODE_STARTED,
    ]
    assert all(not event.event_times for event in events[1:])
    assert [event.finish_reason for event in events] == [None] * 8 + [FinishReason.LENGTH]
    assert not house.scheduler.schedule(16)
    house.assert_empty()


def test_gaps_that_answers_tolerate_are_known_while_they_run() -> None:
    """The ITL targets stay correct when requests end, are cancelled or join the batch."""
    house = House()
    for name, target_s in (("quick", 0.06), ("strict", 0.008), ("any", math.inf)):
        house.deliver(house.allotted(name, target_s))
    assert house.scheduler.gap_targets == []
    house.scheduler.schedule(16)
    assert house.scheduler.gap_targets == [0.008, 0.06, math.inf]
    house.scheduler.apply([100, 100, 100])
    house.abort("strict")
    house.scheduler.schedule(16)
    assert house.scheduler.gap_targets == [0.06, math.inf]
    while house.scheduler.running_requests():
        house.scheduler.apply([100] * len(house.scheduler.gap_targets))
        house.scheduler.schedule(16)
    assert house.scheduler.gap_targets == []
    house.assert_empty()


@pytest.mark.parametrize(("ignore_eos", "finish"), [(False, FinishReason.STOP), (True, None)])
def test_end_of_sequence(ignore_eos: bool, finish: FinishReason | None) -> None:
    house = House()
    house.arrive("q", ignore_eos=ignore_eos)
    house.scheduler.schedule(16)
    (routed,) = events_of(house.scheduler.apply([FACTS.eos_token_ids[0]]))
    assert routed.event.finish_reason is finish


def test_the_batch_is_limited_and_refilled_in_order_of_arrival() -> None:
    house = House(batch=2)
    for name in "abc":
        house.arrive(name, max_tokens=3 if name == "a" else 5)
    assert len(house.scheduler.schedule(16)) == 2
    house.scheduler.apply([50, 50])
    assert len(house.scheduler.schedule(16)) == 2
    house.scheduler.apply([50, 50])
    house.scheduler.schedule(16)
    events = events_of(house.scheduler.apply([50, 50]))
    assert {routed.event.ref.request_id for routed in events} == {"b", "c"}


def test_a_request_joins_at_a_step_boundary_only() -> None:
    house = House()
    house.arrive("a")
    assert len(house.scheduler.schedule(16)) == 1
    house.arrive("b")
    assert len(events_of(house.scheduler.apply([50]))) == 1
    assert len(house.scheduler.schedule(16)) == 2


def test_a_running_request_is_dropped_at_the_boundary() -> None:
    house = House()
    house.arrive("a")
    house.scheduler.schedule(16)
    house.abort("a")
    assert house.pool.counts().owned > 0
    house.scheduler.apply([50])
    assert not house.scheduler.schedule(16)
    house.assert_empty()


def test_an_adapter_is_in_use_until_no_step_computes_with_it() -> None:
    """A cancelled request still has its row in the step in flight, which reads the adapter's weights."""
    house = House()
    for name in ("base", "tuned"):
        lease = house.reserve(name, adapter="" if name == "base" else "hash")
        house.allocate_pages(lease)
        house.deliver(lease)
    house.scheduler.schedule(16)
    house.abort("tuned")
    assert house.admission.open_requests == 1
    assert house.admission.adapters() == {"", "hash"}
    house.scheduler.apply([50, 50])
    assert house.admission.adapters() == {""}


def test_a_lease_that_is_refused_takes_neither_promised_nor_cached_pages() -> None:
    house = House(pages=8)
    house.arrive("q", tokens=9, max_tokens=3)
    for token in (50, 51):
        house.scheduler.schedule(16)
        house.scheduler.apply([token])
    house.assert_empty()
    assert house.pool.counts().cached > 0
    before = house.pool.counts()
    house.admission.peer_gone(P)
    for _ in range(10):
        with pytest.raises(Unavailable):
            house.reserve("q", tokens=9, attempt=2)
        assert house.pool.counts() == before
        house.assert_empty()
    house.admission.peer_back(P)
    house.reserve("q", tokens=9, attempt=2, max_tokens=24)  # 8 pages: all there are
    assert house.pool.counts().shared > 0, "what was refused would have read these pages"


def test_a_full_house_promises_nothing_more() -> None:
    house = House(pages=8, max_pages=4)
    house.reserve("a", tokens=5, max_tokens=4)  # 2 pages
    house.reserve("b", tokens=5, max_tokens=4)
    with pytest.raises(ResourceExhausted):
        house.reserve("c", tokens=1, max_tokens=1)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        house.reserve("d", tokens=5, max_tokens=100)
    house.abort("a")
    house.reserve("c", tokens=1, max_tokens=1)


def test_pages_are_allotted_once() -> None:
    house = House()
    lease = house.reserve("a")
    assert house.allocate_pages(lease) == house.allocate_pages(lease)
    with pytest.raises(InvalidArgument):
        house.admission.allocate_pages(house.reserve("b"), 1, P)
    with pytest.raises(StaleEpoch):
        house.admission.allocate_pages(lease, 2, PeerRef("prefill-1", 1))


def test_a_late_notice_frees_the_quarantine() -> None:
    house = House()
    lease = house.reserve("a")
    house.allocate_pages(lease)
    house.abort("a")
    assert house.pool.counts().quarantined == 2
    house.deliver(lease)
    assert not house.scheduler.schedule(16)
    assert house.admission.fenced == 1
    house.assert_empty()


@pytest.mark.parametrize(
    "changes", [{"token_hash": b"another"}, {"pages": 3}, {"first_token_id": FACTS.eos_token_ids[0]}]
)
def test_a_notice_that_does_not_fit_fails_closed(changes: dict[str, object]) -> None:
    house = House()
    lease = house.reserve("a")
    house.allocate_pages(lease)
    house.deliver(lease, **changes)
    (routed,) = house.events
    assert routed.event.error is not None
    assert routed.event.error.code == "TRANSFER_FAILED"
    assert house.admission.fenced == 1
    house.assert_empty()


class Checks:
    """Checks of page 0 of each prompt whose results the test gives by hand."""

    def __init__(self) -> None:
        self.results: list[Callable[[str], None]] = []
        self.closed = False

    def chosen(self, _lease: Lease, _tokens: int, _skipped: int) -> tuple[int, ...]:
        return (0,)

    def compare(self, _pages: object, _reported: object, _tokens: int, on_result: Callable[[str], None]) -> None:
        if self.closed:
            raise Unavailable("closing")
        self.results.append(on_result)


SUMS = (PageChecksum(0, 7),)


def errors_of(house: House) -> list[str]:
    return [routed.event.error.code for routed in house.events if routed.event.error is not None]


@pytest.mark.parametrize("checks", [None, Checks()], ids=["nothing is checked", "page 0 is"])
@pytest.mark.parametrize("reported", [(), SUMS, (PageChecksum(1, 7),), (*SUMS, PageChecksum(1, 7))])
def test_a_sender_cannot_choose_what_is_checked(checks: Checks | None, reported: tuple[PageChecksum, ...]) -> None:
    house = House(checks=checks)
    lease = house.reserve("a")
    house.allocate_pages(lease)
    house.deliver(lease, checksums=reported)
    agreed = reported == (() if checks is None else SUMS)
    assert errors_of(house) == ([] if agreed else ["TRANSFER_FAILED"])
    assert house.admission.fenced == (not agreed)
    if not agreed:
        house.assert_empty()


@pytest.mark.parametrize("result", ["", "other bytes"])
def test_a_check_without_a_result_ends_the_request_at_once_and_frees_its_pages_later(result: str) -> None:
    checks = Checks()
    house = House(checks=checks)
    lease = house.reserve("a")
    house.allocate_pages(lease)
    house.deliver(lease, checksums=SUMS)
    house.now = 3.0
    house.admission.expire()
    assert (house.events, house.admission.open_requests) == ([], 1)
    house.now = 3.1
    house.admission.expire()
    house.admission.expire()
    assert errors_of(house) == ["TRANSFER_FAILED"]
    assert house.admission.open_requests == 0
    assert house.pool.counts().owned == 2
    checks.results[0](result)
    assert not house.scheduler.schedule(16)
    assert errors_of(house) == ["TRANSFER_FAILED"]
    house.assert_empty()


def test_a_result_that_cannot_be_followed_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Checks()
    house = House(checks=checks)
    lease = house.reserve("a")
    house.allocate_pages(lease)
    house.deliver(lease, checksums=SUMS)
    monkeypatch.setattr("decode_worker.requests.EventTime", None)
    checks.results[0]("")
    assert errors_of(house) == ["TRANSFER_FAILED"]
    house.assert_empty()


def test_checks_that_are_closed_fail_the_request() -> None:
    checks = Checks()
    checks.closed = True
    house = House(checks=checks)
    lease = house.reserve("a")
    house.allocate_pages(lease)
    house.deliver(lease, checksums=SUMS)
    assert errors_of(house) == ["TRANSFER_FAILED"]
    house.assert_empty()


@pytest.mark.parametrize("result", ["", "other bytes"])
def test_the_step_loop_is_woken_by_the_result_of_a_check_not_by_its_beginning(result: str) -> None:
    checks = Checks()
    house = House(checks=checks)
    lease = house.reserve("a")
    house.allocate_pages(lease)
    house.woken = 0
    house.deliver(lease, checksums=SUMS)
    assert house.woken == 0
    checks.results[0](result)
    assert house.woken == 1


def test_what_arrives_unchecked_wakes_the_step_loop() -> None:
    house = House()
    lease = house.reserve("a")
    house.allocate_pages(lease)
    house.woken = 0
    house.deliver(lease)
    assert house.woken == 1


def test_a_stranger_cannot_deliver() -> None:
    house = House()
    lease = house.reserve("a")
    house.allocate_pages(lease)
    house.deliver(lease, prefill=PeerRef("prefill-0", 2))
    assert not house.scheduler.schedule(16)
    assert house.admission.fenced == 1


def test_a_lease_without_heartbeat_ends_and_the_router_is_notified() -> None:
    house = House()
    promised, advertised = house.reserve("a"), house.reserve("b")
    house.allocate_pages(advertised)
    house.now = 4.0
    assert house.admission.heartbeat([promised]) == ()
    house.now = 6.0
    house.admission.expire()
    assert [routed.event.ref.request_id for routed in house.events] == ["b"]
    assert house.pool.counts().quarantined == 2
    house.admission.peer_gone(P)
    house.now = 7.5
    house.admission.expire()
    house.assert_empty()


def test_operations_in_any_order_leak_nothing() -> None:
    for seed in range(60):
        random_walk(random.Random(seed))


def random_walk(rng: random.Random) -> None:
    """Reservations, transfers, steps, aborts and expiries at random; then the writers fall silent and all is free."""
    house = House(pages=24, batch=3)
    open_leases: list[Lease] = []
    for turn in range(120):
        choice = rng.random()
        try:
            if choice < 0.25:
                name, attempt = f"q{rng.randrange(8)}", rng.randrange(1, 4)
                lease = house.reserve(
                    name, tokens=rng.randrange(1, 12), attempt=attempt, max_tokens=rng.randrange(1, 9)
                )
                open_leases += [lease] if lease not in open_leases else []
            elif choice < 0.45 and open_leases:
                house.allocate_pages(rng.choice(open_leases))
            elif choice < 0.6 and open_leases:
                house.deliver(open_leases.pop(rng.randrange(len(open_leases))))
            elif choice < 0.7 and open_leases:
                house.admission.release(open_leases.pop(rng.randrange(len(open_leases))), P)
            elif choice < 0.8:
                house.abort(f"q{rng.randrange(8)}", attempt=rng.randrange(1, 4))
            elif choice < 0.85:
                house.now += 2.0
                house.admission.expire()
            else:
                rows = house.scheduler.schedule(16)
                pages = [page for row in rows for page in row.page_ids]
                assert len(set(pages)) == len(pages)
                if rows:
                    house.scheduler.apply([100 + turn] * len(rows))
        except (StaleEpoch, ResourceExhausted):
            pass
        house.pool.check_integrity()
    house.admission.abort_router("r")
    house.scheduler.schedule(16)
    house.admission.peer_gone(P)
    house.now += 10.0
    house.admission.expire()
    house.assert_empty()


@pytest.mark.parametrize("stage", ["leased", "arrived", "running"])
def test_an_abort_of_an_earlier_attempt_leaves_the_one_that_is_here(stage: str) -> None:
    """An abort is repeated until it is delivered, which may be after the next attempt has begun."""
    house = House()
    lease = house.reserve("q", attempt=2)
    house.allocate_pages(lease)
    if stage != "leased":
        house.deliver(lease)
    if stage == "running":
        assert len(house.scheduler.schedule(16)) == 1
        house.scheduler.apply([7])
    house.abort("q", attempt=1)
    if stage == "leased":
        house.deliver(lease)
    assert len(house.scheduler.schedule(16)) == 1
    house.scheduler.apply([8])
    house.abort("q", attempt=3)
    assert len(house.scheduler.schedule(16)) == 0
    house.assert_empty()


def test_two_routers_may_use_the_same_request_id() -> None:
    house = House()
    lease = house.reserve("q")
    house.allocate_pages(lease)
    reservation = Reservation("other", RequestRef("q", 2), (3, 4, 5), SamplingParams(max_tokens=6), P)
    other = house.admission.reserve(reservation).lease
    house.admission.abort("other", [RequestRef("q", 2)])
    with pytest.raises(StaleEpoch):
        house.admission.allocate_pages(other, 1, P)
    house.deliver(lease)
    assert len(house.scheduler.schedule(16)) == 1
    house.abort("q")
    house.scheduler.apply([7])
    house.scheduler.schedule(16)
    house.assert_empty()


def test_a_step_of_two_routers_has_columns_for_each_and_events_for_those_that_end() -> None:
    house = House()
    for name, router, limit in (("a", "r", 6), ("b", "other", 5), ("c", "r", 6)):
        house.arrive(name, router=router, max_tokens=limit)
    house.scheduler.schedule(16)
    joined = house.scheduler.apply([10, 20, 30])
    assert [(event.router_id, event.event.token_ids) for event in joined.events] == [
        ("r", (10,)), ("other", (20,)), ("r", (30,)),
    ]  # fmt: skip
    assert not joined.plain_tokens()

    house.scheduler.schedule(16)
    usual = house.scheduler.apply([11, 21, 31])
    assert not usual.events
    assert usual.plain_tokens() == [
        RoutedTokens("r", StepTokens(["a", "c"], [1, 1], [2, 2], [11, 31])),
        RoutedTokens("other", StepTokens(["b"], [1], [2], [21])),
    ]

    house.scheduler.schedule(16)
    house.abort("a")  # its step is launched: what comes of it is nobody's
    assert house.scheduler.apply([12, 22, 32]).plain_tokens() == [
        RoutedTokens("r", StepTokens(["c"], [1], [3], [32])),
        RoutedTokens("other", StepTokens(["b"], [1], [3], [22])),
    ]

    house.scheduler.schedule(16)
    ended = house.scheduler.apply([23, 33])
    assert [(event.router_id, event.event.finish_reason) for event in ended.events] == [("other", FinishReason.LENGTH)]
    assert ended.plain_tokens() == [RoutedTokens("r", StepTokens(["c"], [1], [4], [33]))]


def test_an_answer_is_whole_whenever_it_is_asked_for() -> None:
    """Although its newest tokens are in the batch's columns."""
    house = House(pages=64, batch=2)
    house.arrive("late", max_tokens=90)
    house.arrive("soon", max_tokens=90, presence_penalty=1)
    house.scheduler.schedule(16)
    late, soon = house.scheduler._batch.requests
    house.scheduler.apply([100, 100])
    said = [FIRST, 100]
    for index in range(2, 80):
        house.scheduler.schedule(16)
        house.scheduler.apply([99 + index, 99 + index])
        said.append(99 + index)
        assert soon.history is not None
        assert soon.history.answer == said  # as the sampler looks back on it, without asking
        if index in (5, 33, 34, 70, 79):
            assert late.token_ids == said
            assert late.token_ids == said  # asked twice, handed over once
    house.abort("late")
    house.scheduler.schedule(16)
    assert late.batch is None
    assert late.answer == said


def test_the_transport_receives_each_count_before_the_next_change() -> None:
    """Counts told outside the lock could arrive in the wrong order: a stale 0 would put the transport to rest."""
    house = House()
    expectations: list[tuple[int, bool]] = []
    house.admission._expect = lambda leases: expectations.append((leases, house.admission.lock.locked()))
    house.arrive("q")
    house.reserve("r")
    house.abort("r")
    with pytest.raises(InvalidArgument):
        house.reserve("s", tokens=10_000)
    assert [leases for leases, _ in expectations] == [1, 0, 1, 0, 0]
    assert all(held for _, held in expectations)


def test_quarantine_beyond_its_share_stops_promises_until_the_dead_writer_is_surely_quiet() -> None:
    house = House(pages=8)
    for name in ("a", "b"):
        house.allocate_pages(house.reserve(name, tokens=4 * PAGE_TOKENS - 1, max_tokens=1))
    house.abort("a")
    assert not house.admission.not_ready
    house.abort("b")
    with pytest.raises(ResourceExhausted, match="too many of its 8 KV pages are in quarantine, as prefill-0"):
        house.reserve("d", tokens=1, max_tokens=1)
    house.admission.peer_gone(P)
    assert house.admission.not_ready
    house.now = 1.5
    house.admission.expire()
    assert not house.admission.not_ready
    house.assert_empty()


def test_a_worker_is_ready_again_only_well_below_the_share_and_says_the_same_meanwhile() -> None:
    """Ten of twenty pages are the share, eight the part of it that makes the worker ready again."""
    house = House(pages=20)
    leases = {name: house.reserve(name, tokens=PAGE_TOKENS - 1, max_tokens=1) for name in "abcdefghijkl"}
    for name, lease in leases.items():
        house.allocate_pages(lease)
        house.abort(name)
        if name == "k":
            said = house.admission.not_ready
    assert said
    for name in "abc":
        house.deliver(leases[name])
        assert house.admission.not_ready == said
    assert house.pool.counts().quarantined == 9
    house.deliver(leases["d"])
    assert not house.admission.not_ready


@pytest.mark.parametrize(("far", "grace_s"), [(False, 1.0), (True, 60.0)])
def test_pages_of_a_dead_writer_far_away_are_kept_longer(far: bool, grace_s: float) -> None:
    house = House()
    house.far = far
    house.allocate_pages(house.reserve("q"))
    house.admission.peer_gone(P)
    house.now += grace_s - 0.1
    house.admission.expire()
    assert house.pool.counts().quarantined == 2
    house.now += 0.1
    house.admission.expire()
    house.assert_empty()


def test_one_end_that_cannot_be_followed_keeps_no_other_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    first, second = house.reserve("q1"), house.reserve("q2")
    for lease in (first, second):
        house.allocate_pages(lease)
    quarantine = house.pool.quarantine

    def broken(lease: Lease) -> None:
        if lease == first:
            raise KeyError("a defect")
        quarantine(lease)

    monkeypatch.setattr(house.pool, "quarantine", broken)
    house.admission.delivered([first, second, second], P)
    assert house.pool.counts().advertised == 2
    assert house.pool.counts().quarantined == 2
    assert house.admission.open_leases == house.expected == 2


@pytest.mark.parametrize("aborted", [False, True])
def test_pages_of_a_release_in_doubt_are_free_after_the_grace(aborted: bool) -> None:
    house = House()
    lease = house.reserve("q")
    house.allocate_pages(lease)
    if aborted:
        house.abort("q", attempt=1)
    house.admission.release(lease, P, in_doubt=True)
    house.admission.release(lease, P, in_doubt=True)
    assert house.admission.refs() == []
    house.now += 0.9
    house.admission.expire()
    assert house.pool.counts().quarantined == 2
    house.now += 0.1
    house.admission.expire()
    house.assert_empty()


def test_a_writer_that_is_back_is_given_leases_again() -> None:
    house = House()
    house.admission.peer_gone(P)
    with pytest.raises(Unavailable):
        house.reserve("q")
    house.admission.peer_back(P)
    house.arrive("q")
