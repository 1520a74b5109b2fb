"""Reports of sent notices: their time, receiver and number."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from tandem.protocol.errors import InvalidArgument, Unavailable
from tandem.protocol.messages import Destination, Lease, PeerRef
from tandem.worker.peers import deliveries
from tandem.worker.peers.deliveries import Deliveries
from tests.worker_pair import until

HERE, THERE = PeerRef("decode-0", 1), PeerRef("decode-1", 4)
PERIOD_S = 0.02


class Ears:
    def __init__(self) -> None:
        self.heard: list[tuple[PeerRef, str, list[int]]] = []
        self.deaf = 0
        self.refuses = False

    async def tell(self, peer: PeerRef, address: str, leases: Sequence[Lease]) -> bool:
        if self.deaf:
            self.deaf -= 1
            raise Unavailable("not now")
        if self.refuses:
            raise InvalidArgument("leases", "are nothing that this worker knows")
        self.heard.append((peer, address, [lease.epoch for lease in leases]))
        return True

    @property
    def epochs(self) -> list[int]:
        return [epoch for _, _, epochs in self.heard for epoch in epochs]


@pytest.fixture
async def ears() -> Ears:
    return Ears()


@pytest.fixture
async def told(ears: Ears) -> AsyncIterator[Deliveries]:
    made = Deliveries(ears.tell, PERIOD_S)
    yield made
    await made.close()


def to(peer: PeerRef, epoch: int) -> Destination:
    return Destination(peer, f"{peer.worker_id}:1", Lease("q", 1, epoch))


async def test_each_peer_hears_its_own_once_and_together(told: Deliveries, ears: Ears) -> None:
    for epoch in range(5):
        told.add(to(HERE, epoch))
    told.add(to(THERE, 9))
    await until(lambda: len(ears.epochs) == 6)
    await asyncio.sleep(3 * PERIOD_S)
    assert sorted(ears.heard, key=lambda each: each[1]) == [
        (HERE, "decode-0:1", [0, 1, 2, 3, 4]),
        (THERE, "decode-1:1", [9]),
    ]


async def test_nothing_is_named_before_a_period_is_over(ears: Ears) -> None:
    ages: list[float] = []
    clock = asyncio.get_running_loop().time
    left: dict[int, float] = {}

    async def tell(_peer: PeerRef, _address: str, leases: Sequence[Lease]) -> bool:
        ages.extend(clock() - left[lease.epoch] for lease in leases)
        return True

    told = Deliveries(tell, PERIOD_S)
    for epoch in range(20):
        left[epoch] = clock()
        told.add(to(HERE, epoch))
        await asyncio.sleep(PERIOD_S / 7)
    await until(lambda: len(ages) == 20)
    assert min(ages) >= PERIOD_S
    await told.close()


async def test_what_is_not_heard_is_said_again(told: Deliveries, ears: Ears) -> None:
    ears.deaf = 2
    told.add(to(HERE, 1))
    await until(lambda: ears.epochs)
    assert ears.epochs == [1]
    told.add(to(HERE, 2))
    await until(lambda: len(ears.epochs) == 2)


async def test_many_are_named_in_several_calls(told: Deliveries, ears: Ears, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "MOST_LEASES", 3)
    for epoch in range(8):
        told.add(to(HERE, epoch))
    await until(lambda: len(ears.epochs) == 8)
    assert [len(epochs) for _, _, epochs in ears.heard] == [3, 3, 2]


async def test_what_is_refused_is_not_said_again(told: Deliveries, ears: Ears) -> None:
    ears.refuses = True
    told.add(to(HERE, 1))
    await until(lambda: not told._peers)
    ears.refuses = False
    told.add(to(HERE, 2))
    await until(lambda: ears.epochs)
    assert ears.epochs == [2]


async def test_what_a_silent_peer_does_not_hear_is_bounded(
    told: Deliveries, ears: Ears, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "MOST_WAITING", 4)
    ears.deaf = 1
    for epoch in range(4):
        told.add(to(HERE, epoch))
    await until(lambda: told._peers[HERE].late)
    told.add(to(HERE, 4))
    await until(lambda: len(ears.epochs) == 4)
    assert ears.epochs == [1, 2, 3, 4]


async def test_what_is_forgotten_during_a_call_takes_nothing_else_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "MOST_WAITING", 4)
    monkeypatch.setattr(deliveries, "MOST_LEASES", 2)
    heard: list[int] = []

    async def tell(_peer: PeerRef, _address: str, leases: Sequence[Lease]) -> bool:
        if not heard:
            told.add(to(HERE, 4))
        heard.extend(lease.epoch for lease in leases)
        return True

    told = Deliveries(tell, PERIOD_S)
    for epoch in range(4):
        told.add(to(HERE, epoch))
    await until(lambda: not told._peers)
    assert heard == [0, 1, 2, 3, 4]


async def test_closing_ends_it(told: Deliveries, ears: Ears) -> None:
    told.add(to(HERE, 1))
    await told.close()
    await asyncio.sleep(3 * PERIOD_S)
    assert not ears.heard
