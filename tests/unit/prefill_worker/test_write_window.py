"""Write windows are renewed in time, one message per pair of workers, and never without a hand-over."""

import asyncio
import math
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from prefill_worker import write_window
from prefill_worker.decode_peers import AllocatedPages, DecodePeers, Renewal
from prefill_worker.write_window import WindowRenewals, WriteWindow
from tandem.protocol.errors import DeadlineExceeded, Internal, StaleEpoch, TransferFailed, Unavailable
from tandem.protocol.messages import Destination, Lease, PeerRef
from tests.model.processes import ProcessLoop

HERE, THERE = PeerRef("decode-0", 1), PeerRef("decode-1", 4)
T = TypeVar("T")
WINDOW_S = 9.0
PERIOD_S = WINDOW_S / 3


@dataclass
class Message:
    at: float
    peer: PeerRef
    epochs: list[int]
    within_s: float


@dataclass
class Decode(DecodePeers):
    """Decode workers that answer, late or never, on the clock of a virtual loop."""

    loop: ProcessLoop
    received: list[Message] = field(default_factory=list)
    over: set[int] = field(default_factory=set)
    errors: list[Exception] = field(default_factory=list)
    answer_after_s: float = 0.0
    allot_after_s: float = 0.0

    async def connect(self, destination: Destination) -> None: ...

    async def allocate_pages(self, destination: Destination, pages: int) -> AllocatedPages:
        await asyncio.sleep(self.allot_after_s)
        return AllocatedPages((7,), WINDOW_S)

    async def renew(self, peer: PeerRef, address: str, leases: Sequence[Lease], within_s: float) -> Renewal:
        assert address == f"{peer.worker_id}:1"
        self.received.append(Message(self.loop.time() - 1000, peer, [lease.epoch for lease in leases], within_s))
        if self.errors:
            raise self.errors.pop(0)
        await asyncio.sleep(min(self.answer_after_s, within_s))
        if self.answer_after_s > within_s:
            raise DeadlineExceeded("too late")
        return Renewal(frozenset(lease for lease in leases if lease.epoch in self.over), WINDOW_S)

    def delivered(self, destination: Destination) -> None: ...

    async def release(self, destination: Destination, *, in_doubt: bool) -> None: ...


class Scene:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.loop = ProcessLoop()
        clock = SimpleNamespace(monotonic=self.loop.time)
        patch.setattr("prefill_worker.write_window.time", clock)
        self.decode = Decode(self.loop)
        self.renewals = WindowRenewals(self.decode)

    def open(self, epoch: int, peer: PeerRef = HERE) -> WriteWindow:
        made = WriteWindow(
            self.decode, self.renewals, Destination(peer, f"{peer.worker_id}:1", Lease("q", 1, epoch)), 1
        )
        assert self.run(made.pages()) == (7,)
        return made

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result, of what takes no time."""
        return self.begin(coroutine).result()

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        with self.loop.running():
            task: asyncio.Task[T] = self.loop.create_task(coroutine)
        self.loop.run_ready()
        return task

    def close(self, window: WriteWindow) -> None:
        with window:
            pass

    @property
    def epochs(self) -> list[list[int]]:
        return [message.epochs for message in self.decode.received]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(monkeypatch)
    yield made
    assert not made.loop.failures
    assert not made.loop.unretrieved_failures()
    made.loop.close()


def test_all_of_a_pair_go_in_one_message_however_many_there_are(scene: Scene) -> None:
    windows = [scene.open(epoch) for epoch in range(1, 40)]
    scene.open(50, THERE)
    scene.loop.advance(PERIOD_S / 2)
    windows.append(scene.open(40))
    scene.loop.advance(PERIOD_S / 2 + 0.001)
    assert sorted(scene.epochs, key=len) == [[50], [*range(1, 41)]]
    scene.loop.advance(2 * PERIOD_S)
    assert len(scene.decode.received) == 6
    assert [message.at for message in scene.decode.received if message.peer == HERE] == [PERIOD_S, 2 * PERIOD_S, 9.0]
    assert all(scene.run(window.ensure_open()) >= scene.loop.time() + WINDOW_S - PERIOD_S - 0.01 for window in windows)


def test_short_hand_overs_send_none(scene: Scene) -> None:
    for epoch in range(20):
        window = scene.open(epoch)
        scene.loop.advance(0.9 * PERIOD_S)
        scene.close(window)
    scene.loop.advance(3 * WINDOW_S)
    assert scene.decode.received == []
    assert not scene.renewals._pairs


def test_time_counts_from_before_the_message(scene: Scene) -> None:
    window = scene.open(1)
    scene.decode.answer_after_s = 0.9 * PERIOD_S
    scene.loop.advance(1.95 * PERIOD_S)
    assert scene.run(window.ensure_open()) == 1000 + PERIOD_S + WINDOW_S


def test_the_first_permission_counts_from_before_it_was_asked_for(scene: Scene) -> None:
    """The decode worker counts from when the question came, which is before the answer did."""
    scene.decode.allot_after_s = 0.5 * PERIOD_S
    window = WriteWindow(scene.decode, scene.renewals, Destination(HERE, "decode-0:1", Lease("q", 1, 1)), 1)
    pages = scene.begin(window.pages())
    scene.loop.advance(0.6 * PERIOD_S)
    assert pages.result() == (7,)
    assert window.closes_at() == 1000 + WINDOW_S
    scene.loop.advance(0.5 * PERIOD_S)
    assert [message.at for message in scene.decode.received] == [PERIOD_S], "its renewal is due as early"
    scene.close(window)


def test_a_lost_message_does_not_end_the_permission(scene: Scene) -> None:
    window = scene.open(1)
    scene.decode.errors = [Unavailable("lost")]
    scene.loop.advance(0.999 * WINDOW_S)
    assert [message.at for message in scene.decode.received] == [PERIOD_S, 2 * PERIOD_S]
    assert scene.decode.received[0].within_s == PERIOD_S
    assert scene.run(window.ensure_open()) == 1000 + 2 * PERIOD_S + WINDOW_S


def test_an_answer_that_does_not_come_is_waited_for_no_longer_than_a_period(scene: Scene) -> None:
    scene.open(1)
    scene.decode.answer_after_s = math.inf
    scene.loop.advance(WINDOW_S)
    assert [message.at for message in scene.decode.received] == [PERIOD_S, 2 * PERIOD_S]


def test_an_ended_window_is_not_renewed_unless_a_write_needs_it(scene: Scene) -> None:
    window = scene.open(1)
    scene.decode.errors = [Internal("a defect"), Unavailable("lost"), Unavailable("still lost")]
    scene.loop.advance(5 * WINDOW_S)
    assert len(scene.decode.received) == 2
    with pytest.raises(Unavailable, match="still lost"):
        scene.run(window.ensure_open())
    assert scene.run(window.ensure_open()) == scene.loop.time() + WINDOW_S
    assert len(scene.decode.received) == 4
    scene.loop.advance(PERIOD_S + 0.001)
    assert len(scene.decode.received) == 5


def test_a_pair_is_forgotten_with_its_last_permission_though_that_had_ended(scene: Scene) -> None:
    windows = [scene.open(number, PeerRef("decode-0", number)) for number in range(20)]
    scene.decode.errors = [Unavailable("dead")] * 2000
    scene.loop.advance(3 * WINDOW_S)
    assert len(scene.renewals._pairs) == 20
    for window in windows:
        scene.close(window)
    assert scene.renewals._pairs == {}


def test_who_needs_it_at_once_shares_the_message(scene: Scene) -> None:
    windows = [scene.open(epoch) for epoch in (1, 2, 3)]
    scene.decode.errors = [Unavailable("lost")] * 2
    scene.loop.advance(2 * WINDOW_S)
    scene.decode.received.clear()
    scene.decode.answer_after_s = 0.5
    waiting = [scene.begin(window.ensure_open()) for window in windows]
    waiting[0].cancel()
    scene.loop.advance(1.0)
    assert scene.epochs == [[1, 2, 3]]
    assert [waiter.result() for waiter in waiting[1:]] == [scene.loop.time() - 1.0 + WINDOW_S] * 2


def test_a_lease_that_is_over_is_named_once_and_gives_no_permission(scene: Scene) -> None:
    gone, alive = scene.open(1), scene.open(2)
    scene.decode.over = {1}
    scene.loop.advance(PERIOD_S + 0.001)
    with pytest.raises(StaleEpoch, match="ended at decode-0"):
        scene.run(gone.ensure_open())
    assert gone.closes_at() == -math.inf, "a write that is posted already begins no more either"
    assert alive.closes_at() == 1000 + PERIOD_S + WINDOW_S
    scene.loop.advance(PERIOD_S)
    assert scene.epochs == [[1, 2], [2]]
    assert scene.run(alive.ensure_open()) > scene.loop.time()


def test_of_a_lease_that_is_over_nothing_is_asked_any_more(scene: Scene) -> None:
    gone = scene.open(1)
    scene.decode.over = {1}
    scene.loop.advance(3 * WINDOW_S)
    assert scene.epochs == [[1]]
    scene.open(2)
    with pytest.raises(StaleEpoch):
        scene.run(gone.ensure_open())
    assert scene.epochs == [[1]], "its window has ended, but it is no reason to renew the other"


def test_a_defect_before_the_message_is_not_met_again_at_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    windows, calls = write_window._PeerWindows.asked_for, []

    def asked_for(pair: write_window._PeerWindows) -> list[WriteWindow]:
        calls.append(scene.loop.time() - 1000)
        if len(calls) < 9:
            raise RuntimeError("a defect")
        return windows(pair)

    monkeypatch.setattr(write_window._PeerWindows, "asked_for", asked_for)
    scene.open(1)
    scene.loop.advance(0.999 * WINDOW_S)
    assert calls == [PERIOD_S, 2 * PERIOD_S]


def test_the_failure_of_a_renewal_without_waiters_is_not_reported(scene: Scene) -> None:
    """The scene's end looks for failures that nobody has seen."""
    window = scene.open(1)
    scene.decode.errors = [Unavailable("lost")] * 2
    scene.loop.advance(2 * WINDOW_S)
    scene.decode.answer_after_s = math.inf
    waiting = scene.begin(window.ensure_open())
    waiting.cancel()
    scene.loop.advance(2 * PERIOD_S)
    assert len(scene.decode.received) == 3


def test_windows_of_a_decode_worker_are_renewed_together_after_one_was_closed_amid_its_renewal(scene: Scene) -> None:
    closed = scene.open(1)
    scene.decode.errors = [Unavailable("lost")] * 2
    scene.loop.advance(2 * WINDOW_S)
    scene.decode.received.clear()
    scene.decode.answer_after_s = 0.5
    asked = scene.begin(closed.ensure_open())
    scene.close(closed)
    second = scene.open(2)
    scene.loop.advance(1.0)
    assert asked.done()
    third = scene.open(3)
    scene.loop.advance(PERIOD_S)
    assert scene.epochs == [[1], [2, 3]]
    scene.close(second)
    scene.close(third)
    scene.loop.advance(WINDOW_S)
    assert scene.renewals._pairs == {}


def test_an_answer_that_took_longer_than_it_is_good_for_is_none(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    window = scene.open(1)
    scene.decode.errors = [Unavailable("lost")] * 2
    scene.loop.advance(WINDOW_S)
    monkeypatch.setattr(write_window, "RENEW_AT", 2.0)
    scene.decode.answer_after_s = 1.5 * WINDOW_S
    late = scene.begin(window.ensure_open())
    scene.loop.advance(2 * WINDOW_S)
    assert isinstance(late.exception(), TransferFailed)


def test_a_message_is_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_window, "MOST_LEASES", 3)
    for epoch in range(8):
        scene.open(epoch)
    scene.loop.advance(PERIOD_S + 0.001)
    assert scene.epochs == [[0, 1, 2], [3, 4, 5], [6, 7]]


@pytest.mark.parametrize("asked", [False, True], ids=["before a message", "while its answer is on its way"])
def test_closing_ends_it(scene: Scene, asked: bool) -> None:
    scene.open(1)
    scene.decode.answer_after_s = PERIOD_S / 2
    scene.loop.advance(PERIOD_S + 0.1 if asked else 0.1)
    (pair,) = scene.renewals._pairs.values()
    asking = pair.asking
    scene.run(scene.renewals.close())
    assert asking is None or asking.cancelled()
    scene.loop.advance(WINDOW_S)
    assert scene.epochs == [[1]] * asked
