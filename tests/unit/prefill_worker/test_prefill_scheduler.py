"""The order and the chunks in which the prefill half computes prompts."""

import asyncio
from collections.abc import Collection, Sequence

import pytest

from prefill_worker.queue import WaitingPrompts
from prefill_worker.request import PrefillRequest
from prefill_worker.scheduler import PrefillScheduler
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.engine.steps.batch import StepRow
from tandem.protocol.errors import InvalidArgument, StaleEpoch
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.lifecycle.events import LifecycleEvent
from tandem.protocol.messages import (
    Destination,
    FinishReason,
    Lease,
    PeerRef,
    PrefillTask,
    RequestRef,
    SamplingParams,
    TransferNotice,
    hash_token_ids,
)
from tandem.settings.worker import WorkerSettings
from tests.fake_engine import FACTS, PAGE_TOKENS

ME = PeerRef("prefill-0", 1)


class OtherScheduler:
    """A decode half in this process, with leases made by hand."""

    def __init__(self) -> None:
        self.pages: dict[Lease, list[int]] = {}
        self.notices: list[TransferNotice] = []

    def allocate_pages(self, lease: Lease, pages: int, prefill: PeerRef) -> Sequence[int]:
        if lease not in self.pages:
            raise StaleEpoch("it is over")
        return self.pages[lease]

    def release(self, lease: Lease, prefill: PeerRef) -> None:
        raise AssertionError("never asked here")

    def take(self, lease: Lease, pages: int, position: int, prefill: PeerRef) -> Sequence[int]:
        raise AssertionError("never asked here")

    def held(self, lease: Lease) -> int:
        raise AssertionError("never asked here")

    def notice(self, notice: TransferNotice, pages: Sequence[int] = (), states: Collection[int] = ()) -> None:
        self.notices.append(notice)


class Handed:
    """A handoff that does nothing but note that it was aborted."""

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


class House:
    """A half over a pool, and the requests it has handed over."""

    def __init__(self, pages: int = 64, max_rows: int = 64) -> None:
        self.pool = PagePool(pages)
        self.local = OtherScheduler()
        self.requests: dict[str, PrefillRequest] = {}
        self.scheduler = PrefillScheduler(
            config=WorkerSettings(max_prefill_rows=max_rows),
            me=ME,
            cache=PrefixCache(self.pool, KvPages(PAGE_TOKENS)),
            model=FACTS,
            local=self.local,
            begin_handoff=self._begin_handoff,  # type: ignore[arg-type]
            wake=lambda: None,
            events=asyncio.get_running_loop(),
        )

    def _begin_handoff(self, request: PrefillRequest, scheduler: PrefillScheduler) -> Handed:
        self.requests[request.task.ref.request_id] = request
        return Handed()

    def submit(
        self,
        name: str,
        tokens: int,
        max_tokens: int = 5,
        attempt: int = 1,
        *,
        lease: Lease | None = None,
        salt: str | None = None,
    ) -> None:
        """Under a salt of its own by default: then no request of another name has anything it could use."""
        there = Destination(ME, "", lease) if lease else None
        prompt = tuple(range(3, 3 + tokens))
        ref, sampling = RequestRef(name, attempt), SamplingParams(max_tokens)
        salt = name if salt is None else salt
        self.scheduler.submit(PrefillTask("r", ref, prompt, sampling, there, cache_salt=salt))

    def step(self, budget: int) -> list[StepRow]:
        rows = self.scheduler.schedule(budget)
        self.scheduler.apply([7 if row.draw else None for row in rows])
        return rows


def pieces(rows: Sequence[StepRow]) -> list[tuple[int, int]]:
    """Start and length of each row."""
    return [(row.start, len(row.token_ids)) for row in rows]


async def test_chunks_of_several_prompts_fill_a_step_the_shortest_first() -> None:
    house = House()
    house.submit("a", 10)
    house.submit("b", 3)
    house.submit("c", 20)
    assert pieces(house.step(8)) == [(0, 5), (0, 3)]
    assert pieces(house.step(8)) == [(5, 5), (0, 3)]
    assert pieces(house.step(8)) == [(3, 8)]
    assert pieces(house.step(8)) == [(11, 8)]
    last = house.step(8)
    assert pieces(last) == [(19, 1)]
    assert last[0].draw is not None
    assert last[0].draw.index == 0
    assert house.step(8) == []


async def test_rows_are_limited_as_well() -> None:
    house = House(max_rows=2)
    for name in "abc":
        house.submit(name, 2)
    assert len(house.step(100)) == 2
    assert len(house.step(100)) == 1


async def test_no_room_left_by_decoding_means_no_prompt() -> None:
    house = House()
    house.submit("a", 2)
    assert house.step(0) == []
    assert house.pool.counts().owned == 0


async def test_the_first_prompt_waits_for_pages_and_none_overtakes_it() -> None:
    house = House(pages=8)
    house.submit("first", 30)
    house.submit("large", 20)
    house.submit("small", 2)
    assert pieces(house.step(100)) == [(0, 30)]
    assert house.step(100) == []
    assert house.scheduler.queue.length == 2
    assert house.scheduler.waiting_tokens() == 22
    assert house.scheduler.waiting() == WaitingPrompts(2, 22, 0)
    house.scheduler.free(house.requests["first"])
    assert pieces(house.step(100)) == [(0, 20), (0, 2)]
    for name in ("large", "small"):
        house.scheduler.free(house.requests[name])
    counts = house.pool.counts()
    assert counts.free + counts.cached == 8
    assert house.scheduler.known_requests() == 0


async def test_a_prompt_larger_than_the_pool_is_refused() -> None:
    house = House(pages=2)
    with pytest.raises(InvalidArgument, match="prompt_token_ids"):
        house.submit("a", 9)
    assert house.scheduler.known_requests() == 0


async def test_first_token_that_ends_the_answer_says_so() -> None:
    house = House()
    house.submit("a", 3, max_tokens=1)
    rows = house.scheduler.schedule(10)
    (routed,) = house.scheduler.apply([7] * len(rows))
    assert routed.router_id == "r"
    assert routed.event.token_ids == (7,)
    assert routed.event.finish_reason is FinishReason.LENGTH


async def test_a_withdrawn_request_is_released_only_after_its_step() -> None:
    house = House()
    house.submit("a", 3)
    rows = house.scheduler.schedule(10)
    house.scheduler.withdraw(house.requests["a"])
    assert not house.requests["a"].progress.released
    assert house.scheduler.apply([7] * len(rows)) == []
    house.scheduler.deliver_updates()
    await asyncio.sleep(0)
    assert house.requests["a"].progress.released
    assert house.requests["a"].progress.first_token_id is None


async def test_a_withdrawn_request_is_released_only_after_the_last_of_its_steps_in_flight() -> None:
    house = House()
    house.submit("a", 20)
    request = house.requests["a"]
    chunks = [house.scheduler.schedule(8), house.scheduler.schedule(8)]
    assert [pieces(rows) for rows in chunks] == [[(0, 8)], [(8, 8)]]
    house.scheduler.withdraw(request)
    for in_flight in (1, 0):
        assert house.scheduler.apply([None]) == []
        house.scheduler.deliver_updates()
        await asyncio.sleep(0)
        assert request.progress.released == (not in_flight), "the step in flight writes to its pages"
    assert house.step(8) == []
    house.scheduler.free(request)
    assert house.pool.counts().owned == 0


async def test_when_the_engine_has_died_its_step_is_released() -> None:
    house = House()
    house.submit("a", 30)
    house.scheduler.schedule(10)
    house.scheduler.withdraw(house.requests["a"])
    house.scheduler.abandon()
    assert house.requests["a"].progress.released


async def test_local_prompts_are_computed_in_the_leases_pages() -> None:
    house = House()
    lease = Lease("a", 1, 1)
    house.local.pages[lease] = [40, 41]
    house.submit("a", 6, lease=lease)
    (row,) = house.step(10)
    assert list(row.page_ids) == [40, 41]
    (notice,) = house.local.notices  # at once: the next step that is planned has its row
    assert (notice.lease, notice.pages, notice.first_token_id, notice.skipped) == (lease, 2, 7, 0)
    assert notice.token_hash == hash_token_ids(range(3, 9))
    house.scheduler.free(house.requests["a"])
    assert house.pool.counts().owned == 0


async def test_a_local_prompt_that_ends_with_its_first_token_or_is_withdrawn_goes_nowhere() -> None:
    house = House()
    for name, most in (("one", 1), ("gone", 5)):
        lease = Lease(name, 1, 1)
        house.local.pages[lease] = [40, 41]
        house.submit(name, 6, most, lease=lease)
    rows = house.scheduler.schedule(100)
    house.scheduler.withdraw(house.requests["gone"])
    house.scheduler.apply([7] * len(rows))
    assert house.local.notices == []


async def test_a_prompt_starts_after_its_cached_prefix() -> None:
    house = House()
    house.submit("a", 10, salt="")
    assert pieces(house.step(100)) == [(0, 10)]
    house.submit("b", 10, salt="")
    assert house.scheduler.waiting_tokens() == 10, "nobody knows before its pages are taken"
    rows = house.scheduler.schedule(1)
    assert pieces(rows) == [(8, 1)]
    assert rows[0].page_ids[:2] == house.requests["a"].pages[:2]
    assert house.scheduler.waiting_tokens() == 2, "one of them is being computed"
    house.scheduler.apply([None])
    assert house.scheduler.waiting_tokens() == 1
    rows = house.scheduler.schedule(100)
    assert pieces(rows) == [(9, 1)]
    (event,) = house.scheduler.apply([7])
    assert event.event.cached_tokens == 8
    events = [stamp.event for stamp in event.event.event_times]
    assert events == [
        LifecycleEvent.PREFILL_QUEUED,
        LifecycleEvent.PREFILL_STARTED,
        LifecycleEvent.PREFILL_FINISHED,
    ]
    await asyncio.sleep(0)
    for name in "ab":
        house.scheduler.free(house.requests[name])
    assert house.pool.counts().shared == 0


async def test_its_handoff_receives_cached_pages_before_anything_is_computed() -> None:
    house = House()
    house.submit("a", 10, salt="")
    house.step(100)
    house.submit("b", 10, salt="")
    house.scheduler.schedule(1)
    await asyncio.sleep(0)
    assert house.requests["b"].progress.computed_tokens == 8


async def test_what_decode_holds_of_a_local_prompt_is_read_in_the_cache() -> None:
    house = House()
    house.submit("a", 10, salt="")
    house.step(100)
    lease = Lease("b", 1, 1)
    house.local.pages[lease] = [41]
    house.submit("b", 10, salt="", lease=lease)
    (row,) = house.step(100)
    assert row.start == 8
    assert list(row.page_ids) == [*house.requests["a"].pages[:2], 41]
    house.scheduler.free(house.requests["a"])
    assert house.pool.counts().shared == 2
    house.scheduler.free(house.requests["b"])
    assert house.pool.counts().shared == 0


async def test_a_local_lease_that_is_over_fails_its_request_alone() -> None:
    house = House()
    house.submit("lost", 6, lease=Lease("lost", 1, 1))
    house.submit("other", 6)
    assert len(house.step(100)) == 1
    await asyncio.sleep(0)
    assert isinstance(house.requests["lost"].progress.failure, StaleEpoch)
    assert house.requests["lost"].progress.released
