"""Reports of sent notices: their time, receiver and number."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from tandem.protocol.errors import InvalidArgument, Unavailable
from tandem.protocol.messages import Destination, Lease, PeerRef
from tandem.worker.peers import deliveries as deliveries_module
from tandem.worker.peers.deliveries import Deliveries
from tests.worker_pair import until

HERE, THERE = PeerRef("decode-0", 1), PeerRef("decode-1", 4)
PERIOD_S = 0.02


class Receivers:
    def __init__(self) -> None:
        self.calls: list[tuple[PeerRef, str, list[int]]] = []
        self.unavailable_calls = 0
        self.refuses = False

    async def report(self, peer: PeerRef, address: str, leases: Sequence[Lease]) -> bool:
        if self.unavailable_calls:
            self.unavailable_calls -= 1
            raise Unavailable("not now")
        if self.refuses:
            raise InvalidArgument("leases", "are nothing that this worker knows")
        self.calls.append((peer, address, [lease.epoch for lease in leases]))
        return True

    @property
    def epochs(self) -> list[int]:
        return [epoch for _, _, epochs in self.calls for epoch in epochs]


@pytest.fixture
async def receivers() -> Receivers:
    return Receivers()


@pytest.fixture
async def deliveries(receivers: Receivers) -> AsyncIterator[Deliveries]:
    made = Deliveries(receivers.report, PERIOD_S)
    yield made
    await made.close()


def to(peer: PeerRef, epoch: int) -> Destination:
    return Destination(peer, f"{peer.worker_id}:1", Lease("q", 1, epoch))


async def test_each_peer_gets_its_leases_once_and_in_one_call(deliveries: Deliveries, receivers: Receivers) -> None:
    for epoch in range(5):
        deliveries.add(to(HERE, epoch))
    deliveries.add(to(THERE, 9))
    await until(lambda: len(receivers.epochs) == 6)
    await asyncio.sleep(3 * PERIOD_S)
    assert sorted(receivers.calls, key=lambda call: call[1]) == [
        (HERE, "decode-0:1", [0, 1, 2, 3, 4]),
        (THERE, "decode-1:1", [9]),
    ]


async def test_leases_are_reported_a_period_after_they_are_added(receivers: Receivers) -> None:
    ages: list[float] = []
    clock = asyncio.get_running_loop().time
    left: dict[int, float] = {}

    async def report(_peer: PeerRef, _address: str, leases: Sequence[Lease]) -> bool:
        ages.extend(clock() - left[lease.epoch] for lease in leases)
        return True

    deliveries = Deliveries(report, PERIOD_S)
    for epoch in range(20):
        left[epoch] = clock()
        deliveries.add(to(HERE, epoch))
        await asyncio.sleep(PERIOD_S / 7)
    await until(lambda: len(ages) == 20)
    assert min(ages) >= PERIOD_S
    await deliveries.close()


async def test_a_failed_report_is_repeated(deliveries: Deliveries, receivers: Receivers) -> None:
    receivers.unavailable_calls = 2
    deliveries.add(to(HERE, 1))
    await until(lambda: receivers.epochs)
    assert receivers.epochs == [1]
    deliveries.add(to(HERE, 2))
    await until(lambda: len(receivers.epochs) == 2)


async def test_many_leases_are_reported_in_several_calls(
    deliveries: Deliveries, receivers: Receivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries_module, "MOST_LEASES", 3)
    for epoch in range(8):
        deliveries.add(to(HERE, epoch))
    await until(lambda: len(receivers.epochs) == 8)
    assert [len(epochs) for _, _, epochs in receivers.calls] == [3, 3, 2]


async def test_a_refused_report_is_not_repeated(deliveries: Deliveries, receivers: Receivers) -> None:
    receivers.refuses = True
    deliveries.add(to(HERE, 1))
    await until(lambda: not deliveries._peers)
    receivers.refuses = False
    deliveries.add(to(HERE, 2))
    await until(lambda: receivers.epochs)
    assert receivers.epochs == [2]


async def test_the_leases_that_wait_for_a_silent_peer_are_bounded(
    deliveries: Deliveries, receivers: Receivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries_module, "MOST_WAITING", 4)
    receivers.unavailable_calls = 1
    for epoch in range(4):
        deliveries.add(to(HERE, epoch))
    await until(lambda: deliveries._peers[HERE].late)
    deliveries.add(to(HERE, 4))
    await until(lambda: len(receivers.epochs) == 4)
    assert receivers.epochs == [1, 2, 3, 4]


async def test_dropping_a_lease_during_a_call_drops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries_module, "MOST_WAITING", 4)
    monkeypatch.setattr(deliveries_module, "MOST_LEASES", 2)
    epochs: list[int] = []

    async def report(_peer: PeerRef, _address: str, leases: Sequence[Lease]) -> bool:
        if not epochs:
            deliveries.add(to(HERE, 4))
        epochs.extend(lease.epoch for lease in leases)
        return True

    deliveries = Deliveries(report, PERIOD_S)
    for epoch in range(4):
        deliveries.add(to(HERE, epoch))
    await until(lambda: not deliveries._peers)
    assert epochs == [0, 1, 2, 3, 4]


async def test_nothing_is_reported_after_close(deliveries: Deliveries, receivers: Receivers) -> None:
    deliveries.add(to(HERE, 1))
    await deliveries.close()
    await asyncio.sleep(3 * PERIOD_S)
    assert not receivers.calls
