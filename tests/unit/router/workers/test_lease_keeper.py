"""Heartbeats continue, whatever error one of them meets."""

import asyncio
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from router.placement.fleet import Fleet
from router.workers.lease_keeper import LeaseKeeper
from router.workers.worker_link import WorkerLink
from tandem.protocol.errors import DeadlineExceeded, TandemError
from tandem.protocol.messages import GrantedLease, Lease, Role
from tests.model.processes import ProcessLoop
from tests.unit.router.fake_cluster import FakeWorker, until
from tests.unit.router.workers.test_worker_pool import Observer

LEASE = Lease("r", 1, 1)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessLoop]:
    made = ProcessLoop()
    monkeypatch.setattr("router.workers.lease_keeper.time", SimpleNamespace(monotonic=made.time))
    yield made
    made.run_ready()
    made.close()


async def test_a_defect_in_one_round_ends_no_heartbeat(caplog: pytest.LogCaptureFixture) -> None:
    rounds: list[Sequence[Lease]] = []

    async def beat(leases: Sequence[Lease], _timeout_s: float) -> frozenset[Lease]:
        rounds.append(leases)
        if len(rounds) == 1:
            raise ValueError("a broken reply")
        return frozenset()

    supervisor = LeaseKeeper(beat, lambda _: None)
    supervisor.keep(GrantedLease(LEASE, 0.03))
    await until(lambda: len(rounds) >= 3, "heartbeats after the broken one")
    supervisor.close()
    assert "a broken reply" in caplog.text


def test_one_heartbeat_names_all_leases_of_a_worker(loop: ProcessLoop) -> None:
    rounds: list[Sequence[Lease]] = []

    async def beat(leases: Sequence[Lease], _timeout_s: float) -> frozenset[Lease]:
        rounds.append(leases)
        return frozenset()

    leases = [Lease(f"q{n}", 1, n) for n in range(1, 40)]
    supervisor = LeaseKeeper(beat, lambda _: None)
    with loop.running():
        for lease in leases:
            supervisor.keep(GrantedLease(lease, 0.3))
    loop.advance(0.25)
    assert rounds == [leases, leases]
    for lease in leases[1:]:
        supervisor.drop(lease.request_id)
    loop.advance(0.1)
    assert rounds[2:] == [leases[:1]]
    supervisor.close()


def test_a_stalled_heartbeat_is_given_up_before_the_lease_is_over(loop: ProcessLoop) -> None:
    """A heartbeat gets a third of the lease's lifetime, and the next one is sent at once."""
    clock, began = loop.time, loop.time()
    sent: list[float] = []
    given_up: list[float] = []
    given: list[float] = []

    async def beat(_leases: Sequence[Lease], timeout_s: float) -> frozenset[Lease]:
        sent.append(clock() - began)
        given.append(timeout_s)
        await asyncio.sleep(timeout_s)
        given_up.append(clock() - began)
        raise DeadlineExceeded("stalled")

    supervisor = LeaseKeeper(beat, lambda _: None)
    with loop.running():
        supervisor.keep(GrantedLease(Lease("long", 1, 2), 60.0))
        supervisor.keep(GrantedLease(LEASE, 1.2))
    loop.advance(1.3)
    supervisor.close()
    assert given == [pytest.approx(0.4)] * 3
    assert sent == pytest.approx([0.4, 0.8, 1.2]), "no pause after a whole period of waiting"
    assert given_up == pytest.approx([0.8, 1.2])


def test_a_lease_is_lost_when_three_heartbeats_in_a_row_say_so(loop: ProcessLoop) -> None:
    """A lease may be unknown just after its request was admitted; a heartbeat without a reply says nothing."""
    other = Lease("other", 1, 2)
    unknown = frozenset({LEASE})
    answers: list[frozenset[Lease] | DeadlineExceeded] = [
        unknown,
        unknown,
        frozenset({other}),
        unknown,
        unknown,
        DeadlineExceeded("stalled"),
        unknown,
        unknown,
    ]
    sent: list[Sequence[Lease]] = []
    lost: list[tuple[Lease, int]] = []

    async def beat(leases: Sequence[Lease], _timeout_s: float) -> frozenset[Lease]:
        sent.append(leases)
        answer = answers[len(sent) - 1]
        if isinstance(answer, DeadlineExceeded):
            raise answer
        return answer

    supervisor = LeaseKeeper(beat, lambda lease: lost.append((lease, len(sent))))
    with loop.running():
        supervisor.keep(GrantedLease(LEASE, 0.3))
        supervisor.keep(GrantedLease(other, 0.3))
    loop.advance(0.85)
    supervisor.close()
    assert lost == [(LEASE, 7)]
    assert sent[-1] == [other], "a lost lease is kept alive no longer"


def test_only_the_newest_lease_of_a_request_can_be_lost(loop: ProcessLoop) -> None:
    """The reply to a heartbeat may name a lease that was replaced while the call was in flight."""
    newer = Lease(LEASE.request_id, 2, 2)
    lost: list[Lease] = []

    async def beat(_leases: Sequence[Lease], _timeout_s: float) -> frozenset[Lease]:
        return frozenset({LEASE})

    supervisor = LeaseKeeper(beat, lost.append)
    with loop.running():
        supervisor.keep(GrantedLease(LEASE, 0.3))
    loop.advance(0.25)
    supervisor.keep(GrantedLease(newer, 0.3))
    loop.advance(1.0)
    assert len(supervisor) == 1
    assert not lost
    supervisor.close()


async def test_the_call_to_the_worker_has_that_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    stalled = asyncio.Event()

    async def never(_self: FakeWorker, _request: object, _context: object) -> None:
        stalled.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(FakeWorker, "Heartbeat", never)
    worker = await FakeWorker("decode-0", Role.DECODE).start()
    settings = {"router_id": "router-0", "token": "", "rpc_timeout_s": 10.0, "silence_s": 0.0}
    link = WorkerLink(worker.info, Fleet(), Observer(), **settings)  # type: ignore[arg-type]
    with pytest.raises(TandemError) as failure:
        await asyncio.wait_for(link._heartbeat([LEASE], 0.1), 60)
    assert isinstance(failure.value, DeadlineExceeded)
    assert stalled.is_set()
    await link.close()
    await worker.kill()
