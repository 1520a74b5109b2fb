"""Heartbeats go on, whatever one of them meets."""

import asyncio
from collections.abc import Sequence

import pytest

from router.fleet import Fleet
from router.lease_keeper import LeaseKeeper
from router.worker_link import WorkerLink
from tests.unit.router.fake_cluster import FakeWorker, until
from tests.unit.router.test_worker_pool import Observer
from wire.errors import DeadlineExceeded, TandemError
from wire.messages import GrantedLease, Lease, Role

LEASE = Lease("r", 1, 1)


async def test_a_defect_in_one_round_ends_no_heartbeat(caplog: pytest.LogCaptureFixture) -> None:
    rounds: list[Sequence[Lease]] = []

    async def beat(leases: Sequence[Lease], _timeout_s: float) -> frozenset[Lease]:
        rounds.append(leases)
        if len(rounds) == 1:
            raise ValueError("a broken reply")
        return frozenset()

    keeper = LeaseKeeper(beat, lambda _: None)
    keeper.keep(GrantedLease(LEASE, 0.03))
    await until(lambda: len(rounds) >= 3, "heartbeats after the broken one")
    keeper.close()
    assert "a broken reply" in caplog.text


async def test_one_heartbeat_names_all_leases_of_a_worker() -> None:
    rounds: list[Sequence[Lease]] = []

    async def beat(leases: Sequence[Lease], _timeout_s: float) -> frozenset[Lease]:
        rounds.append(leases)
        return frozenset()

    leases = [Lease(f"q{n}", 1, n) for n in range(1, 40)]
    keeper = LeaseKeeper(beat, lambda _: None)
    for lease in leases:
        keeper.keep(GrantedLease(lease, 0.3))
    await until(lambda: len(rounds) == 2, "two heartbeats")
    assert rounds == [leases, leases]
    for lease in leases[1:]:
        keeper.drop(lease.request_id)
    await until(lambda: len(rounds) == 3, "one more")
    assert rounds[2] == leases[:1]
    keeper.close()


async def test_a_stalled_heartbeat_is_given_up_before_the_lease_is_over() -> None:
    """It gets a third of the lease, and the next one leaves at once."""
    clock = asyncio.get_running_loop().time
    sent: list[float] = []
    given_up: list[float] = []
    given: list[float] = []

    async def beat(_leases: Sequence[Lease], timeout_s: float) -> frozenset[Lease]:
        sent.append(clock())
        given.append(timeout_s)
        await asyncio.sleep(timeout_s)
        given_up.append(clock())
        raise DeadlineExceeded("stalled")

    keeper = LeaseKeeper(beat, lambda _: None)
    keeper.keep(GrantedLease(Lease("long", 1, 2), 60.0))
    keeper.keep(GrantedLease(LEASE, 1.2))
    await until(lambda: len(sent) == 3, "three heartbeats")
    keeper.close()
    assert given == [pytest.approx(0.4)] * 3
    assert sent[2] - given_up[1] < 0.3, "no pause after a whole period of waiting"


async def test_the_call_to_the_worker_has_that_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    stalled = asyncio.Event()

    async def never(_self: FakeWorker, _request: object, _context: object) -> None:
        stalled.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(FakeWorker, "Heartbeat", never)
    worker = await FakeWorker("decode-0", Role.DECODE).start()
    link = WorkerLink(worker.info, Fleet(), Observer(), router_id="router-0", token="", rpc_timeout_s=10.0)
    with pytest.raises(TandemError) as failure:
        await asyncio.wait_for(link._heartbeat([LEASE], 0.1), 5)
    assert isinstance(failure.value, DeadlineExceeded)
    assert stalled.is_set()
    await link.close()
    await worker.kill()
