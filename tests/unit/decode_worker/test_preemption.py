"""Admission by forecast: more run at once than have room for their longest answers, and who is too much gives way.

A router played by hand sends preempted requests once more, after the tokens that it has.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from decode_worker.admission import DecodeAdmission
from decode_worker.page_budget import RETURN_S
from decode_worker.preemption import PROGRESS_TOKENS, choose
from decode_worker.request import DecodeRequest, Stage
from decode_worker.requests import DecodeRequests
from decode_worker.scheduler import DecodeScheduler
from tandem.cost_model.answer_length import SEEN_MIN
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.prefix_cache import Prefix, PrefixCache
from tandem.engine.steps.batch import StepRow
from tandem.protocol.errors import InvalidArgument, ResourceExhausted
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.lifecycle.events import LifecycleEvent
from tandem.protocol.messages import (
    GrantedLease,
    Lease,
    PeerRef,
    RequestEvent,
    RequestRef,
    Reservation,
    RoutedEvent,
    SamplingParams,
    TransferNotice,
    hash_token_ids,
)
from tandem.settings.worker import WorkerSettings
from tests.fake_engine import FACTS, PAGE_TOKENS
from tests.soak import seeds
from tests.unit.decode_worker.step_events import events_of

P = PeerRef("prefill-0", 1)
STOP = 2


@dataclass
class Asked:
    """One request and what its client has: token number i is 100 + i, the last one perhaps `STOP`."""

    name: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    length: int
    got: list[int] = field(default_factory=list)
    attempt: int = 0
    preempted: int = 0
    progress: list[int] = field(default_factory=list)
    """Tokens that each attempt has brought."""

    @property
    def over(self) -> bool:
        return len(self.got) == self.length

    def token(self, index: int) -> int:
        last = index + 1 == self.length and self.length < self.sampling.max_tokens
        return STOP if last else 100 + index


class House:
    """A decode half and its router.

    `asynchronous`: a step is scheduled while the previous one runs; `late`: KV arrives in random order instead of the
    order of the leases.
    """

    def __init__(
        self,
        pages: int,
        *,
        batch: int = 8,
        max_pages: int | None = None,
        asynchronous: bool = False,
        late: random.Random | None = None,
    ) -> None:
        self.pool = PagePool(pages)
        self.now = 0.0
        self.cache = PrefixCache(self.pool, KvPages(PAGE_TOKENS))
        self.notes: list[RoutedEvent] = []
        self.admission = DecodeAdmission(
            config=WorkerSettings(kv_lease_s=1e6),
            me=PeerRef("decode-0", 1),
            cache=self.cache,
            model=FACTS,
            clock=lambda: self.now,
            expect=lambda _leases: None,
            emit=self.notes.append,
            wake=lambda: None,
            transport_poll_s=lambda: self.now,
            same_host=lambda _peer: True,
        )
        self.admission.limit(max_pages)
        self.scheduler = DecodeScheduler(
            requests=self.admission.requests,
            lock=self.admission.lock,
            model=FACTS,
            kv=KvPages(PAGE_TOKENS),
            max_batch_requests=batch,
        )
        self.asynchronous = asynchronous
        self.late = late
        self.coming: list[Callable[[], None]] = []
        """Prompts whose KV is on its way."""
        self.asked: dict[str, Asked] = {}
        self.waiting: deque[Asked] = deque()
        self.flying: deque[list[tuple[Asked, int]]] = deque()
        self.most_running = 0

    def believe_in_short_answers(self, *limits: int) -> None:
        for limit in limits:
            for _ in range(SEEN_MIN):
                self.admission._budget._lengths.learn(limit, 1)

    def ask(self, name: str, tokens: int, max_tokens: int, length: int | None = None, **sampling: Any) -> Asked:
        first = 10 + len(self.asked)
        prompt = tuple(first if number == 0 else 3 + number for number in range(tokens))
        stops = () if sampling.get("ignore_eos") else (STOP,)
        params = SamplingParams(max_tokens, stop_token_ids=stops, **sampling)
        asked = self.asked[name] = Asked(name, prompt, params, max_tokens if length is None else length)
        self.waiting.append(asked)
        return asked

    def place(self) -> None:
        """In order, as long as there is room."""
        while self.waiting:
            try:
                self._send(self.waiting[0])
            except ResourceExhausted:
                break
            self.waiting.popleft()
        for arrive in list(self.coming):
            if self.late is None or self.late.random() < 0.1:
                self.coming.remove(arrive)
                arrive()

    def step(self) -> list[StepRow]:
        self.now += 0.01
        rows = self.scheduler.schedule(1000)
        self.cache.check_integrity()
        self.most_running = max(self.most_running, len(rows))
        written: set[int] = set()
        launched = []
        for row in rows:
            asked = next(sent for sent in self.asked.values() if row.draw and row.draw.sampling is sent.sampling)
            page = row.page_ids[row.start // PAGE_TOKENS]
            assert page not in written
            assert page not in self.pool.readers()
            written.add(page)
            assert row.draw is not None
            assert row.start == len(asked.prompt) + row.draw.index - 1
            launched.append((asked, row.draw.index))
        if launched:
            self.flying.append(launched)
        # The step loop sleeps now, until somebody else wakes it.
        assert launched or self.flying or self.scheduler.idle or self.coming
        while len(self.flying) > (1 if self.asynchronous and launched else 0):
            done = self.flying.popleft()
            for routed in events_of(self.scheduler.apply([asked.token(index) for asked, index in done])):
                self._take(self.asked[routed.event.ref.request_id], routed.event)
        # Within a step what the half says itself may be heard before its tokens.
        while self.notes:
            self._hear(self.notes.pop(0).event)
        self.cache.check_integrity()
        return rows

    def run(self, steps: int = 20_000) -> None:
        for _ in range(steps):
            self.place()
            if not self.step() and not self.coming and all(asked.over for asked in self.asked.values()):
                break
        for asked in self.asked.values():
            assert asked.got == [asked.token(index) for index in range(asked.length)], asked
        counts = self.pool.counts()
        assert (counts.free + counts.cached, counts.reserved) == (counts.total, 0)
        assert self.admission.open_requests == self.admission.open_leases == 0
        assert self.admission._budget.committed == 0

    def _send(self, asked: Asked) -> None:
        ref, prior_output_tokens = RequestRef(asked.name, asked.attempt + 1), len(asked.got)
        prompt = (*asked.prompt, *asked.got)
        granted = self.admission.reserve(
            Reservation("r", ref, prompt, asked.sampling, P, prior_output_tokens=prior_output_tokens)
        )
        asked.attempt += 1
        asked.progress.append(0)
        self.coming.append(lambda: self._arrive(asked, ref, prompt, granted))
        if self.late is None:
            self.coming.pop()()

    def _arrive(self, asked: Asked, ref: RequestRef, prompt: tuple[int, ...], granted: GrantedLease) -> None:
        prior_output_tokens = len(asked.got)
        pages = -(-len(prompt) // PAGE_TOKENS)
        self.admission.allocate_pages(granted.lease, pages, P)
        first = asked.token(prior_output_tokens)
        self._take(asked, RequestEvent(ref, prior_output_tokens, (first,)))
        if asked.over:
            self.admission.abort("r", [ref])
            self.admission.release(granted.lease, P)
            return
        skipped = granted.held_tokens // PAGE_TOKENS
        notice = TransferNotice(
            granted.lease, P, hash_token_ids(prompt), pages, first, prior_output_tokens + 1, skipped=skipped
        )
        self.admission.notice(notice)

    def _hear(self, event: RequestEvent) -> None:
        asked = self.asked[event.ref.request_id]
        assert event.error is None
        assert event.preempted
        assert event.first_index == len(asked.got)
        assert event.event_times[-1].event is LifecycleEvent.PREEMPTED
        asked.preempted += 1
        self.waiting.appendleft(asked)

    def _take(self, asked: Asked, event: RequestEvent) -> None:
        assert event.ref.attempt == asked.attempt
        assert event.first_index == len(asked.got)
        asked.got += event.token_ids
        asked.progress[-1] += len(event.token_ids)


@pytest.fixture(params=[False, True], ids=["", "asynchronous"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_expected_lengths_let_more_run_at_once(asynchronous: bool) -> None:
    def most_running(*, taught: bool) -> int:
        house = House(pages=24, asynchronous=asynchronous)
        if taught:
            house.believe_in_short_answers(40)
        for number in range(6):
            house.ask(f"q{number}", 4, 40, length=7)
        house.run()
        assert not house.admission.requests.preemptions
        return house.most_running

    assert most_running(taught=False) == 24 // 11
    assert most_running(taught=True) == 6


def test_answers_that_may_fill_the_context_share_a_pool_from_the_first_on(asynchronous: bool) -> None:
    """Clients that name no limit had it to themselves, one after the other, until 16 of them had ended."""
    house = House(pages=400, asynchronous=asynchronous)
    for number in range(6):
        house.ask(f"q{number}", 4, 1500, length=7)
    house.run()
    assert house.most_running > 1
    assert not house.admission.requests.preemptions


def test_the_youngest_is_preempted_and_continues_after_its_tokens(asynchronous: bool) -> None:
    house = House(pages=12, asynchronous=asynchronous)
    house.believe_in_short_answers(30)
    old, young = (house.ask(name, 4, 30) for name in ("old", "young"))
    house.run()
    assert (old.preempted, old.progress) == (0, [30])
    assert young.preempted == house.admission.requests.preemptions == 1
    assert sum(young.progress) == 30
    assert young.progress[0] > PAGE_TOKENS


def test_where_all_answers_run_to_their_limit_none_is_preempted(asynchronous: bool) -> None:
    house = House(pages=12, asynchronous=asynchronous)
    house.believe_in_short_answers(30)
    for name in "abc":
        house.ask(name, 4, 30, ignore_eos=True)
    house.run()
    assert house.admission.requests.preemptions == 0
    assert house.most_running == 1


def test_one_that_nearly_fills_the_pool_ends_among_others(asynchronous: bool) -> None:
    house = House(pages=20, asynchronous=asynchronous)
    house.believe_in_short_answers(70, 20)
    large = house.ask("large", 5, 70)
    small = [house.ask(f"small-{number}", 5, 20) for number in range(9)]
    house.run()
    assert large.preempted == 0
    assert sum(small_request.preempted for small_request in small) > 0


def test_one_that_nearly_fills_the_pool_ends_after_others(asynchronous: bool) -> None:
    house = House(pages=20, asynchronous=asynchronous)
    house.believe_in_short_answers(70, 20)
    for number in range(4):
        house.ask(f"small-{number}", 5, 20)
    large = house.ask("large", 5, 70)
    for number in range(4, 9):
        house.ask(f"small-{number}", 5, 20)
    house.run()
    assert large.preempted > 0


def test_what_can_never_fit_is_refused_whatever_is_expected() -> None:
    house = House(pages=8)
    house.believe_in_short_answers(100)
    house.ask("q", 4, 100)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        house.place()


def test_no_new_request_takes_the_pages_of_a_preempted_one() -> None:
    house = House(pages=12)
    house.believe_in_short_answers(30, 3)
    house.ask("old", 4, 30)
    young = house.ask("young", 4, 30)
    house.place()
    while not young.preempted:
        house.step()
    house.waiting.clear()
    house.ask("new", 4, 3)
    house.place()
    assert house.waiting
    house.waiting.clear()
    house.now += RETURN_S
    house.waiting.append(house.asked["new"])
    house.place()
    assert not house.waiting


def decoding(epoch: int, brought: int, prior_output_tokens: int = 0) -> DecodeRequest:
    """One that was granted the lease number `epoch` and has brought this many tokens after `prior_output_tokens`."""
    ref, prompt = RequestRef(f"q{epoch}", 1 + bool(prior_output_tokens)), (7,) * (4 + prior_output_tokens)
    reservation = Reservation("r", ref, prompt, SamplingParams(200), P, prior_output_tokens=prior_output_tokens)
    lease = Lease(ref.request_id, ref.attempt, epoch)
    return DecodeRequest(
        reservation, lease, 1, 1, 0, b"", Prefix(b""), 0, Stage.RUNNING, answer=[100] * (prior_output_tokens + brought)
    )


def test_the_youngest_is_chosen_and_never_the_oldest() -> None:
    old, middle, young = (decoding(epoch, 1) for epoch in (1, 2, 3))
    for needy in (old, middle, young):
        assert choose(needy, [middle, young, old]) is young
    assert choose(old, [old, middle]) is middle
    assert choose(old, [old]) is None


def test_a_resumed_request_makes_progress_before_it_is_preempted_again() -> None:
    old, middle, back = decoding(1, 1), decoding(2, 1), decoding(3, PROGRESS_TOKENS - 1, prior_output_tokens=5)
    there = [old, middle, back]
    assert choose(middle, there) is middle
    assert choose(back, there) is None
    assert choose(old, there) is middle
    assert choose(old, [old, back]) is back  # the oldest goes on whatever it costs
    back.token_ids.append(100)
    assert choose(middle, there) is choose(back, there) is back


def test_no_progress_keeps_those_from_the_batch_that_are_older_and_ready() -> None:
    """Nobody joins while one waits for a page."""
    ready, back = decoding(1, 1), decoding(2, PROGRESS_TOKENS - 1, prior_output_tokens=5)
    ready.stage = Stage.READY
    assert choose(back, [ready, back]) is back
    after_output = decoding(3, 1, prior_output_tokens=5)
    assert choose(back, [ready, back, after_output]) is after_output
    assert choose(after_output, [ready, back, after_output]) is None
    ready.stage = Stage.RUNNING
    assert choose(back, [ready, back, after_output]) is None


def test_the_oldest_goes_on_where_its_limit_was_lowered(asynchronous: bool) -> None:
    house = House(pages=20, max_pages=16, asynchronous=asynchronous)
    house.believe_in_short_answers(50)
    house.ask("old", 4, 50)
    house.place()
    house.admission._budget._reservations._limit = 3
    house.run()


def house_of_any_lengths(seed: int, *, asynchronous: bool, late: bool = False) -> House:
    drawn = random.Random(seed)
    pages = drawn.randint(6, 40)
    max_pages = drawn.choice([None, None, max(6, pages - 3)])
    order = random.Random(-1 - seed) if late else None
    house = House(pages, batch=drawn.randint(1, 8), max_pages=max_pages, asynchronous=asynchronous, late=order)
    if drawn.random() < 0.8:
        house.believe_in_short_answers(*(2**bits for bits in range(9)))
    most = (max_pages or pages) * PAGE_TOKENS
    for number in range(drawn.randint(2, 16)):
        tokens = drawn.randint(1, most // 2)
        limit = drawn.randint(1, min(most - tokens, FACTS.max_context - tokens))
        house.ask(f"q{number}", tokens, limit, length=drawn.randint(1, limit))
    return house


@seeds(40)
def test_all_end_whatever_their_lengths(seed: int, asynchronous: bool) -> None:
    house = house_of_any_lengths(seed, asynchronous=asynchronous)
    house.run()
    assert sum(asked.preempted for asked in house.asked.values()) == house.admission.requests.preemptions


@seeds(40)
def test_all_end_in_whatever_order_their_kv_comes(seed: int, asynchronous: bool) -> None:
    """The request with the oldest lease may be ready last, when others are running."""
    house_of_any_lengths(seed, asynchronous=asynchronous, late=True).run()


@seeds(25)
def test_pages_given_together_are_those_given_one_by_one(
    seed: int, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps() -> list[list[tuple[int, Sequence[int]]]]:
        house = house_of_any_lengths(seed, asynchronous=asynchronous)
        rows = []
        while not all(asked.over for asked in house.asked.values()):
            house.place()
            rows.append([(row.start, row.page_ids) for row in house.step()])
        return rows

    together = steps()
    monkeypatch.setattr(DecodeRequests, "grow_all", lambda _self, _requests: False)
    assert together == steps()
