"""The order of writes of a handoff; pages are never freed while a write may still read or land in them."""

import asyncio
import gc
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from kv_transfer.base import PageWrite, Sender, WriteDone
from kv_transfer.ordered_writes import hold
from prefill_worker import handoff, write_window
from prefill_worker.decode_peers import AllocatedPages, DecodePeers, Renewal
from prefill_worker.handoff import Handoff
from prefill_worker.page_writes import WritingTime
from prefill_worker.progress import Progress
from prefill_worker.request import PrefillRequest
from prefill_worker.write_window import WindowRenewals
from tandem.engine.cache.prefix_cache import Prefix
from tandem.protocol.errors import DeadlineExceeded, StaleEpoch, TandemError, TransferFailed, Unavailable
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.messages import (
    Destination,
    FinishReason,
    Lease,
    PeerDescription,
    PeerRef,
    PrefillTask,
    RequestRef,
    RoutedEvent,
    SamplingParams,
    hash_token_ids,
)
from tests.fake_engine import PAGE_TOKENS

ME, THERE = PeerRef("prefill-0", 1), PeerRef("decode-0", 1)
LEASE = Lease("q", 1, 5)
PROMPT = tuple(range(3, 3 + 2 * PAGE_TOKENS + 1))  # three pages


class Scene(Sender, DecodePeers):
    """Everything around one handoff, with a diary. Writes complete when the test says so."""

    def __init__(self, *, destination: bool = True) -> None:
        self.diary: list[str] = []
        self.writes: list[PageWrite] = []
        self.futures: list[Future[WriteDone]] = []
        self.events: list[RoutedEvent] = []
        self.refuse: Exception | None = None
        self.refuse_renewal: Exception | None = None
        self.over: frozenset[Lease] = frozenset()
        self.write_for_s = 100.0
        self.refuse_release: list[Exception] = []
        self.cannot: dict[str, Exception] = {}
        self.allotted = [20, 21, 22]
        self.now_ns = 0
        self.writing = WritingTime(lambda: self.now_ns)
        there = Destination(THERE, "nowhere", LEASE) if destination else None
        task = PrefillTask("r", RequestRef("q", 1), PROMPT, SamplingParams(max_tokens=9), there)
        self.request = PrefillRequest(task, 3, False, Progress(), Prefix(b""), pages=[10, 11, 12])
        self.handoff = Handoff(
            request=self.request,
            scheduler=self,
            me=ME,
            kv=KvPages(PAGE_TOKENS),
            sender=self,
            backend="fake",
            peers=self,
            renewals=WindowRenewals(self),
            local=None,  # type: ignore[arg-type]
            emit=self.events.append,
            deadline_s=1.0,
            writing=self.writing,
        )

    def add_peer(self, description: PeerDescription) -> None: ...

    def remove_peer(self, peer: PeerRef) -> None: ...

    def write(self, write: PageWrite, deadline_s: float) -> "Future[WriteDone]":
        self.diary.append(f"write {list(write.local_pages)}" + (" + notice" if write.notice else ""))
        self.writes.append(write)
        future: Future[WriteDone] = Future()
        self.futures.append(future)
        hold(write.after, lambda why_not: future.set_exception(TransferFailed(why_not)) if why_not else None)
        return future

    async def connect(self, destination: Destination) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.diary.append("connect")

    async def allocate_pages(self, destination: Destination, pages: int) -> AllocatedPages:
        self.diary.append(f"allocate_pages {pages}")
        return AllocatedPages(self.allotted, self.write_for_s)

    async def renew(self, peer: PeerRef, address: str, leases: Sequence[Lease], within_s: float) -> Renewal:
        assert (peer, address, leases) == (THERE, "nowhere", [LEASE])
        self.diary.append("renew")
        if self.refuse_renewal is not None:
            raise self.refuse_renewal
        return Renewal(self.over, self.write_for_s)

    def delivered(self, destination: Destination) -> None:
        self.diary.append("delivered")

    async def release(self, destination: Destination, *, in_doubt: bool) -> None:
        if self.refuse_release:
            raise self.refuse_release.pop(0)
        self.diary.append("release in doubt" if in_doubt else "release")

    def withdraw(self, request: PrefillRequest) -> None:
        self.diary.append("withdraw")
        if "withdraw" in self.cannot:
            raise self.cannot["withdraw"]

    def transfer_outlives_request(self, request: PrefillRequest) -> None:
        self.diary.append("transfer_outlives_request")

    def free(self, request: PrefillRequest) -> None:
        self.diary.append("free")
        if "free" in self.cannot:
            raise self.cannot["free"]

    async def turn(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def compute(self, tokens: int) -> None:
        self.request.progress.advance(tokens)
        await self.turn()

    async def finish(self, reason: FinishReason | None = None) -> None:
        self.request.progress.finish(99, reason)
        await self.turn()

    async def complete_write(self, write: int) -> None:
        self.futures[write].set_result(WriteDone(100, 1, 1000 + write))
        await asyncio.sleep(0.001)
        await self.turn()


async def test_pages_go_as_they_fill_and_the_notice_goes_last() -> None:
    scene = Scene()
    await scene.turn()
    assert scene.diary == ["connect"]
    await scene.compute(PAGE_TOKENS - 1)
    assert scene.diary == ["connect", "allocate_pages 3"]
    await scene.compute(PAGE_TOKENS + 1)
    assert scene.diary[2:] == ["write [10]"]
    await scene.finish()
    assert scene.diary[3:] == ["write [11]", "write [12] + notice"]
    assert [list(write.after) for write in scene.writes] == [[], [], scene.futures[:2]]
    for write in (1, 0, 2):
        await scene.complete_write(write)
    await scene.handoff.ended
    assert scene.diary[5:] == ["delivered", "withdraw", "free"]
    assert [list(write.remote_pages) for write in scene.writes] == [[20], [21], [22]]
    notice = scene.writes[2].notice
    assert notice is not None
    assert (notice.lease, notice.prefill, notice.pages, notice.first_token_id, notice.next_draw) == (
        LEASE,
        ME,
        3,
        99,
        1,
    )
    assert notice.token_hash == hash_token_ids(PROMPT)
    (routed,) = scene.events
    assert routed.event.transfer is not None
    assert (routed.event.transfer.bytes, routed.event.transfer.pages) == (300, 3)
    assert routed.event.transfer.duration_nanos == 3, "the writes alone, not the chunks that were computed between them"
    made = routed.event.event_times[2]
    assert routed.event.event_times == (
        EventTime(LifecycleEvent.TRANSFER_STARTED, 999),
        EventTime(LifecycleEvent.LAST_PAGES_POSTED, 1000),
        made,
        EventTime(LifecycleEvent.NOTICE_POSTED, 1001),
        EventTime(LifecycleEvent.TRANSFER_FINISHED, 1002),
    )
    assert made.event is LifecycleEvent.NOTICE_MADE


async def test_what_decode_holds_is_not_sent() -> None:
    scene = Scene()
    scene.allotted = [21, 22]
    await scene.compute(PAGE_TOKENS)
    assert scene.diary == ["connect", "allocate_pages 3"]
    await scene.compute(2 * PAGE_TOKENS)
    assert scene.diary[2:] == ["write [11]"]
    await scene.finish()
    await scene.complete_write(0)
    await scene.complete_write(1)
    await scene.handoff.ended
    assert [list(write.remote_pages) for write in scene.writes] == [[21], [22]]
    notice = scene.writes[1].notice
    assert notice is not None
    assert (notice.pages, notice.skipped, notice.token_hash) == (3, 1, hash_token_ids(PROMPT))
    (routed,) = scene.events
    assert routed.event.transfer is not None
    assert routed.event.transfer.pages == 2


async def test_the_last_page_alone_goes_with_the_notice() -> None:
    scene = Scene()
    scene.allotted = [22]
    await scene.compute(2 * PAGE_TOKENS)
    await scene.finish()
    await scene.complete_write(0)
    await scene.handoff.ended
    assert scene.diary == ["connect", "allocate_pages 3", "write [12] + notice", "delivered", "withdraw", "free"]


@pytest.mark.parametrize("allotted", [[], [20, 21, 22, 23]])
async def test_an_allotment_that_fits_no_prompt_ends_the_request(allotted: list[int]) -> None:
    scene = Scene()
    scene.allotted = allotted
    await scene.compute(PAGE_TOKENS)
    scene.request.progress.release()
    await scene.handoff.ended
    assert scene.diary == ["connect", "allocate_pages 3", "withdraw", "free", "release"]
    (routed,) = scene.events
    assert routed.event.error is not None
    assert routed.event.error.code == "INTERNAL"


async def test_abort_gives_nothing_back_before_writes_are_quiet() -> None:
    scene = Scene()
    await scene.compute(2 * PAGE_TOKENS)
    scene.handoff.abort()
    await scene.turn()
    assert scene.diary[2:] == ["write [10, 11]", "withdraw"]
    scene.request.progress.release()
    await scene.turn()
    assert scene.diary[-1] == "transfer_outlives_request"
    await scene.complete_write(0)
    await scene.handoff.ended
    assert scene.diary[-2:] == ["free", "release"]
    assert scene.events == []


async def test_a_write_that_fails_early_ends_the_prompt_with_the_next_chunk() -> None:
    scene = Scene()
    await scene.compute(PAGE_TOKENS)
    scene.futures[0].set_exception(TransferFailed("lost"))
    await scene.turn()
    await scene.compute(2 * PAGE_TOKENS)
    assert scene.diary[2:] == ["write [10]", "withdraw"]
    (routed,) = scene.events
    assert routed.event.error is not None
    assert routed.event.error.code == "TRANSFER_FAILED"
    scene.request.progress.release()
    await scene.handoff.ended
    assert scene.diary[-2:] == ["free", "release in doubt"]


async def test_writes_that_fail_after_an_abort_are_not_reported() -> None:
    said: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    scene = Scene()
    await scene.compute(PAGE_TOKENS)
    await scene.compute(2 * PAGE_TOKENS)
    scene.handoff.abort()
    scene.request.progress.release()
    for future in scene.futures:
        future.set_exception(TransferFailed("lost"))
    await scene.handoff.ended
    del scene, future
    gc.collect()
    assert said == []


@pytest.mark.parametrize("turns", range(8))
async def test_an_abort_ends_any_wait(turns: int) -> None:
    scene = Scene()
    await scene.compute(PAGE_TOKENS)
    scene.request.progress.finish(99, None)
    for _ in range(turns):
        await asyncio.sleep(0)
    scene.handoff.abort()
    await scene.turn()
    assert scene.diary[-2:] == ["withdraw", "transfer_outlives_request"]


async def test_abort_releases_nothing_before_the_engine_has_released_the_pages() -> None:
    scene = Scene()
    await scene.compute(2 * PAGE_TOKENS)
    scene.handoff.abort()
    await scene.complete_write(0)
    assert scene.diary[-1] == "withdraw"
    scene.request.progress.release()
    await scene.handoff.ended
    assert scene.diary[-2:] == ["free", "release"]


async def test_an_answer_that_ends_at_once_gives_the_lease_back() -> None:
    scene = Scene()
    await scene.compute(PAGE_TOKENS)
    await scene.finish(FinishReason.STOP)
    await scene.complete_write(0)
    await scene.handoff.ended
    assert scene.diary == [
        "connect",
        "allocate_pages 3",
        "write [10]",
        "withdraw",
        "transfer_outlives_request",
        "free",
        "release",
    ]
    assert scene.events == []


async def test_an_answer_that_ends_in_one_chunk_allots_nothing() -> None:
    scene = Scene()
    await scene.turn()
    await scene.finish(FinishReason.STOP)
    await scene.handoff.ended
    assert scene.diary == ["connect", "withdraw", "free", "release"]


async def test_without_destination_there_is_nothing_to_hand_over() -> None:
    scene = Scene(destination=False)
    await scene.finish(FinishReason.LENGTH)
    await scene.handoff.ended
    assert scene.diary == ["withdraw", "free"]


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_failed_write_is_reported_once_and_waits_for_the_others(failing: int) -> None:
    scene = Scene()
    await scene.compute(PAGE_TOKENS)
    await scene.compute(2 * PAGE_TOKENS)
    await scene.finish()
    scene.futures[failing].set_exception(TransferFailed("lost"))
    await scene.turn()
    assert "free" not in scene.diary
    await scene.complete_write(1 - failing)
    await scene.handoff.ended
    assert scene.diary[-2:] == ["free", "release in doubt"]
    (routed,) = scene.events
    assert routed.event.error is not None
    assert routed.event.error.code == "TRANSFER_FAILED"


@pytest.mark.parametrize(("raised", "code"), [(Unavailable("away"), "UNAVAILABLE"), (KeyError("x"), "TRANSFER_FAILED")])
async def test_a_failure_before_the_first_chunk_stops_the_prompt(raised: Exception, code: str) -> None:
    scene = Scene()
    scene.refuse = raised
    await scene.turn()
    assert scene.diary == ["withdraw"]
    scene.request.progress.release()
    await scene.handoff.ended
    assert scene.diary == ["withdraw", "free", "release"]
    (routed,) = scene.events
    assert routed.event.error is not None
    assert routed.event.error.code == code


async def test_a_release_is_repeated_until_it_succeeds_and_the_pages_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handoff, "FIRST_RETRY_S", 0.001)
    scene = Scene()
    scene.refuse_release = [DeadlineExceeded("stalled"), Unavailable("away"), KeyError("a defect")]
    await scene.turn()
    scene.handoff.abort()
    scene.request.progress.release()
    await scene.turn()
    assert scene.diary == ["connect", "withdraw", "free"]
    await asyncio.wait_for(scene.handoff.ended, 60.0)
    assert scene.diary == ["connect", "withdraw", "free", "release"]
    assert not scene.refuse_release


async def test_the_wait_to_give_a_lease_back_doubles_up_to_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode worker that is back after minutes must hear of it soon: its pages are in quarantine until then."""
    waits: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds:
            waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(handoff, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": note}))
    scene = Scene()
    scene.refuse_release = [Unavailable("away")] * 9
    scene.handoff.abort()
    scene.request.progress.release()
    await asyncio.wait_for(scene.handoff.ended, 60.0)
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
    assert scene.diary[-1] == "release"


async def test_an_ended_lease_is_not_released_again() -> None:
    scene = Scene()
    scene.refuse_release = [StaleEpoch("over")]
    scene.handoff.abort()
    scene.request.progress.release()
    await asyncio.wait_for(scene.handoff.ended, 60.0)
    assert scene.diary == ["withdraw", "free"]


async def test_an_event_that_cannot_be_sent_keeps_no_pages() -> None:
    scene = Scene()
    scene.refuse = Unavailable("away")

    def broken(_: RoutedEvent) -> None:
        raise KeyError("a defect")

    scene.handoff._emit = broken
    await scene.turn()
    scene.request.progress.release()
    with pytest.raises(KeyError):
        await scene.handoff.ended
    assert scene.diary == ["withdraw", "free", "release"]


@pytest.mark.parametrize("step", ["withdraw", "free"])
async def test_a_lease_is_released_whatever_fails_and_not_before_writes_have_ended(step: str) -> None:
    scene = Scene()
    scene.cannot[step] = KeyError("a defect")
    await scene.compute(2 * PAGE_TOKENS)
    scene.handoff.abort()
    scene.request.progress.release()
    await scene.turn()
    assert "release" not in scene.diary
    await scene.complete_write(0)
    with pytest.raises(KeyError):
        await asyncio.wait_for(scene.handoff.ended, 60.0)
    assert scene.diary[-1] == "release"


class Hands:
    """The monotonic clock of permissions; sleeping takes no time but moves it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        patch.setattr(write_window, "time", clock)


async def test_a_permission_that_ended_meanwhile_is_asked_for_before_the_next_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hands, scene = Hands(monkeypatch), Scene()
    await scene.compute(PAGE_TOKENS)
    assert scene.writes[0].begin_by() == 1100.0
    hands.now = 1099.0
    await scene.compute(2 * PAGE_TOKENS)
    assert scene.writes[1].begin_by() == 1100.0
    hands.now = 1200.0
    await scene.finish()
    assert scene.diary[3:] == ["write [11]", "renew", "write [12] + notice"]
    assert scene.writes[2].begin_by() == 1300.0, "as it is now: what is held goes by the newest permission"
    assert scene.writes[0].begin_by() == 1300.0
    for write in range(3):
        await scene.complete_write(write)
    await scene.handoff.ended


@pytest.mark.parametrize(
    ("refusal", "code"),
    [(StaleEpoch("over"), "STALE_EPOCH"), (Unavailable("away"), "UNAVAILABLE"), (None, "TRANSFER_FAILED")],
)
async def test_without_permission_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, refusal: TandemError | None, code: str
) -> None:
    hands, scene = Hands(monkeypatch), Scene()
    await scene.compute(PAGE_TOKENS)
    hands.now = 1101.0
    if isinstance(refusal, StaleEpoch):
        scene.over = frozenset({LEASE})
    else:
        scene.refuse_renewal, scene.write_for_s = refusal, 0.0
    await scene.compute(2 * PAGE_TOKENS)
    scene.request.progress.release()
    await scene.complete_write(0)
    await scene.handoff.ended
    assert scene.diary == [
        "connect",
        "allocate_pages 3",
        "write [10]",
        "renew",
        "withdraw",
        "transfer_outlives_request",
        "free",
        "release",
    ]
    (routed,) = scene.events
    assert routed.event.error is not None
    assert routed.event.error.code == code


async def test_a_hand_over_that_is_over_renews_nothing() -> None:
    scene = Scene()
    scene.write_for_s = 0.03
    await scene.compute(PAGE_TOKENS)
    scene.request.progress.release()
    await scene.complete_write(0)
    await scene.handoff.ended
    renewed = scene.diary.count("renew")
    await asyncio.sleep(0.06)
    assert scene.diary.count("renew") == renewed
    assert not scene.handoff._renewals._pairs


async def test_time_of_writes_counts_while_it_passes() -> None:
    """Once for a hand-over, however many of its writes are under way, and not between its chunks."""
    scene, second = Scene(), 10**9

    def later(seconds: int) -> float:
        scene.now_ns += seconds * second
        return scene.writing.seconds

    await scene.compute(1)
    assert later(5) == 0, "permission to write is there, and no page yet"
    await scene.compute(PAGE_TOKENS)
    assert later(2) == 2
    await scene.complete_write(0)
    assert later(3) == 2, "it computes"
    await scene.finish()
    assert later(1) == 3
    await scene.complete_write(1)
    assert later(1) == 4, "the last page is under way"
    await scene.complete_write(2)
    assert later(7) == 4


async def test_writes_count_until_they_are_quiet_however_the_hand_over_ended() -> None:
    scene, second = Scene(), 10**9
    await scene.compute(PAGE_TOKENS)
    scene.handoff.abort()
    await scene.turn()
    scene.now_ns += 4 * second
    assert scene.writing.seconds == 4
    scene.futures[0].set_exception(TransferFailed("late"))
    scene.request.progress.release()
    await scene.handoff.ended
    scene.now_ns += second
    assert scene.writing.seconds == 4
