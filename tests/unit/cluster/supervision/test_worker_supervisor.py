"""Workers pass from one controller to another without ending any that serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from kv_transfer.removed_peers import RemovedPeers
from tandem.cluster import background
from tandem.cluster import worker_supervisor as supervisor
from tandem.cluster.metrics import ClusterMetrics
from tandem.cluster.operations import operator
from tandem.cluster.ray_processes.orphaned_workers import OrphanedWorker, OrphanedWorkers
from tandem.cluster.supervision.health import ClusterHealth, Health, Phase
from tandem.cluster.supervision.process_supervisor import Process
from tandem.cluster.supervision.registry import Registry
from tandem.cluster.supervision.roles import Slot, plan
from tandem.cluster.supervision.size import SizeChange
from tandem.cluster.supervision.takeover import Takeover
from tandem.cluster.worker_supervisor import ControllerConfig, WorkerSupervisor
from tandem.protocol.messages import Assignment, ModelFacts, PeerRef, Role, WorkerInfo
from tandem.settings.cluster import ClusterSettings
from tandem.worker.reporting.description import WorkerDescription, served_of, tuning_of
from tests.unit.cluster.crew import until

FACTS = ModelFacts("m", 10, 10, (), "float32")
CONFIG = ClusterSettings.of(Path("m"), ray_address="auto", token="t", outlive_s=9.0)


class Running:
    """A worker's process, under any supervisor."""

    def __init__(self, world: World, peer: PeerRef, role: Role) -> None:
        self.world = world
        self.peer = peer
        self.assignment = Assignment(role)
        self.serves = True
        self.answers = True
        self.follows = asyncio.Event()
        self.follows.set()
        self.ended = asyncio.Event()
        self.config = ClusterSettings.of(Path("m"), ray_address="auto", token="t", outlive_s=9.0)

    def describe(self) -> WorkerDescription | None:
        slot = Slot(self.peer.worker_id, self.assignment.role, "cpu")
        config = self.world.supervisor._workers
        mine = type(config)(self.config, "t").config(slot, self.assignment)
        description = WorkerDescription(self.peer, self.assignment, self.serves, served_of(mine), tuning_of(mine))
        return description if self.answers else None

    def register(self) -> None:
        self.world.registry.register(
            WorkerInfo(
                self.peer,
                self.assignment.role,
                "127.0.0.1:1",
                FACTS,
                8,
                4,
                8,
                16,
                "cpu",
                "fake",
                assignment=self.assignment,
            )
        )


class OneProcess(Process):
    def __init__(self, running: Running, on_start: Callable[[str], None]) -> None:
        self._running = running
        self._on_start = on_start

    async def pid(self) -> int:
        return 1

    async def start(self) -> None:
        await self._running.follows.wait()
        self._running.register()
        self._on_start("127.0.0.1:9")

    async def ended(self) -> str:
        await self._running.ended.wait()
        return "the process died"

    async def works(self) -> None:
        return

    async def kill(self) -> None:
        raise AssertionError("it never hangs")

    async def end(self, grace_s: float) -> None:
        self._running.ended.set()
        self._running.world.running.remove(self._running)


class Left(OrphanedWorker):
    def __init__(self, running: Running) -> None:
        super().__init__(running.peer)
        self._running = running

    async def describe(self) -> WorkerDescription | None:
        return self._running.describe()

    def process(self, controller_address: str, outlive_s: float, on_start: Callable[[str], None]) -> Process:
        self._running.world.followed.append((self.peer.worker_id, controller_address, outlive_s))
        return OneProcess(self._running, on_start)

    async def end(self, *, keep_group: bool = False) -> None:
        self._running.world.killed.append((self.peer, keep_group))
        self._running.world.running.remove(self._running)


class World(OrphanedWorkers):
    """The workers' processes, and their current supervisor."""

    def __init__(self, config: ClusterSettings = CONFIG) -> None:
        self.running: list[Running] = []
        self.followed: list[tuple[str, str, float]] = []
        self.killed: list[tuple[PeerRef, bool]] = []
        self.kept: list[set[str]] = []
        self.released: list[str] = []
        self.generation = 0
        self.move_in(config)

    def move_in(self, config: ClusterSettings = CONFIG, before: ClusterHealth | None = None) -> WorkerSupervisor:
        """Starts another supervisor, of a controller of its own, which may replace one with this last health."""
        self.registry = Registry()
        slots = before.state.slots if before is not None and before.state is not None else plan(config, 0)
        self.supervisor = WorkerSupervisor(ControllerConfig(config, slots, 0, "t", before=before), self.registry, self)
        metrics = ClusterMetrics("m", "t", frozenset(), list, dict)
        self.supervisor.open("10.0.0.1:5", metrics)
        self.metrics = metrics
        self.supervisor._workers.spawn = self._spawn  # type: ignore[method-assign]
        self.supervisor.fleet._release = self._release
        self.supervisor._assignments._send = self._send_assignment
        self.supervisor.operator._draining._workers = self
        return self.supervisor

    def of(self, worker_id: str) -> Running:
        return max(
            (worker for worker in self.running if worker.peer.worker_id == worker_id),
            key=lambda worker: worker.peer.incarnation,
        )

    async def drain(self, info: WorkerInfo, _grace_s: float) -> None:
        """Drains a worker, which leaves and ends by itself."""
        self.registry.unregister(info.peer)
        self.of(info.peer.worker_id).ended.set()

    async def _send_assignment(self, info: WorkerInfo, assignment: Assignment, _grace_s: float) -> None:
        running = self.of(info.peer.worker_id)
        running.assignment = assignment
        running.register()

    def add(self, worker_id: str, role: Role, incarnation: int = 7) -> Running:
        running = Running(self, PeerRef(worker_id, incarnation), role)
        self.running.append(running)
        return running

    async def _spawn(self, slot: Slot, assignment: Assignment, incarnation: int) -> Process:
        running = self.add(slot.worker_id, assignment.role, incarnation)
        return OneProcess(running, lambda address: self.metrics.opened(slot.worker_id, "worker", address))

    async def _release(self, slot: Slot) -> None:
        self.released.append(slot.worker_id)

    async def living(self) -> list[OrphanedWorker]:
        return [Left(worker) for worker in self.running]

    async def next_generation(self, above: int) -> int:
        self.generation = 1 + max(self.generation, above)
        return self.generation

    async def clear(self, kept: Collection[str]) -> None:
        self.kept.append(set(kept))

    @property
    def serving(self) -> dict[str, int]:
        """The incarnations that serve, by worker."""
        return {info.peer.worker_id: info.peer.incarnation for info in self.registry.membership().workers}


async def test_live_workers_are_kept_and_missing_ones_are_started() -> None:
    world = World()
    world.add("prefill-0", Role.PREFILL)
    await world.supervisor.take_over(Takeover())
    assert world.serving["prefill-0"] == 7
    assert world.supervisor.taken_over == {"prefill-0"}
    assert world.followed == [("prefill-0", "10.0.0.1:5", 9.0)]
    assert world.kept == [{"prefill-0", "decode-0"}]
    await until(lambda: "decode-0" in world.serving)
    assert not world.killed
    await world.supervisor.stop(end_workers=True)
    assert not world.running
    assert world.kept[-1] == set()


async def test_released_workers_live_on_with_the_next_controller() -> None:
    world = World()
    await world.supervisor.take_over(Takeover())
    await until(lambda: len(world.serving) == 2)
    await until(lambda: all(keeper.phase is Phase.SERVING for keeper in world.supervisor.fleet.supervisors.values()))
    before, first = world.serving, world.supervisor
    assert await first.release_workers() == Takeover()
    assert (first.fleet.health(), first.taken_over) == ((), frozenset())
    assert len(world.running) == 2
    second = world.move_in()
    await second.take_over(Takeover())
    assert world.serving == before
    # A death is the next one's to see.
    world.of("decode-0").ended.set()
    await until(lambda: world.serving.get("decode-0", 0) > before["decode-0"])
    await second.stop(end_workers=False)
    assert len(world.running) == 2


async def test_peers_accept_workers_started_after_a_takeover_on_a_host_whose_clock_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A live worker knows of a prefill worker that died without a controller, which no other process remembers."""
    world = World()
    await world.supervisor.take_over(Takeover())
    await until(lambda: len(world.serving) == 2)
    await until(lambda: all(keeper.phase is Phase.SERVING for keeper in world.supervisor.fleet.supervisors.values()))
    dead = world.of("prefill-0").peer
    await world.supervisor.release_workers()
    world.running.remove(world.of("prefill-0"))
    known_to_decode = RemovedPeers()
    known_to_decode.add(dead)

    monkeypatch.setattr("time.time_ns", lambda: 1)
    await world.move_in().take_over(Takeover())
    await until(lambda: len(world.serving) == 2)
    heir = PeerRef("prefill-0", world.serving["prefill-0"])
    assert heir not in known_to_decode
    # The one before takes over again, as the younger has ended: whom it starts is younger still.
    await until(lambda: all(keeper.phase is Phase.SERVING for keeper in world.supervisor.fleet.supervisors.values()))
    await world.supervisor.release_workers()
    world.running.remove(world.of("prefill-0"))
    known_to_decode.add(heir)
    await world.move_in().take_over(Takeover())
    await until(lambda: len(world.serving) == 2)
    assert PeerRef("prefill-0", world.serving["prefill-0"]) not in known_to_decode
    await world.supervisor.stop(end_workers=True)


async def test_who_cannot_be_taken_over_is_ended_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    other = world.add("prefill-0", Role.PREFILL)
    other.config = other.config.with_fields(dtype="bfloat16", model=Path("n"), served_model_names=("m",))
    world.add("decode-0", Role.DECODE, 8).serves = False
    world.add("decode-1", Role.DECODE).answers = False
    old = world.add("decode-2", Role.DECODE, 5)
    world.add("decode-2", Role.DECODE, 6)
    caplog.set_level(logging.WARNING)
    await world.supervisor.take_over(Takeover())
    assert world.supervisor.taken_over == {"decode-2"}
    assert sorted(world.killed, key=str) == sorted(
        [
            (PeerRef("prefill-0", 7), False),
            (PeerRef("decode-0", 8), False),
            (PeerRef("decode-1", 7), False),
            (old.peer, True),
        ],
        key=str,
    )
    for words in ("prefill-0 cannot be taken over, it serves with another model, dtype", "not serve", "not respond"):
        assert words in caplog.text
    await until(lambda: sorted(world.serving) == ["decode-2", "prefill-0"])
    await world.supervisor.stop(end_workers=True)


async def test_who_is_away_stays_away_until_it_is_wanted() -> None:
    world = World(CONFIG.with_fields(decode=2))
    world.add("prefill-0", Role.PREFILL)
    world.add("decode-0", Role.DECODE)
    await world.supervisor.take_over(Takeover(drained=("decode-1",)))
    keeper = world.supervisor.fleet.supervisors["decode-1"]
    await until(lambda: keeper.phase is Phase.DRAINED)
    assert (await world.supervisor.release_workers()).drained == ("decode-1",)
    supervisor = world.move_in(CONFIG.with_fields(decode=2))
    await supervisor.take_over(Takeover(drained=("decode-1",)))
    await until(lambda: supervisor.fleet.supervisors["decode-1"].phase is Phase.DRAINED)
    await supervisor.operator.drain_worker("decode-1", 0.0, restart=True, force=False)
    assert len(world.serving) == 3
    await supervisor.stop(end_workers=True)


async def test_once_the_cluster_serves_sizes_and_settings_are_as_asked(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.add("prefill-0", Role.PREFILL)
    for name in ("decode-0", "decode-1"):
        other = world.add(name, Role.DECODE)
        other.config = other.config.with_fields(max_batch_requests=3)
    await world.supervisor.take_over(Takeover())
    await asyncio.sleep(0.02)
    assert len(world.serving) == 3, "nothing changes before the cluster serves"
    caplog.set_level(logging.WARNING)
    world.supervisor.started.set()
    await until(lambda: "decode-1" not in world.supervisor.fleet.supervisors)
    await until(lambda: world.serving.get("decode-0", 0) > 7)
    assert sorted(world.serving) == ["decode-0", "prefill-0"]
    assert world.released == ["decode-1"]
    assert world.serving["prefill-0"] == 7
    assert "was started with another max_batch_requests; restarting it" in caplog.text
    await world.supervisor.stop(end_workers=True)


async def test_failures_once_the_cluster_serves_are_logged_and_the_rest_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    world.add("prefill-0", Role.PREFILL)
    for name in ("decode-0", "decode-1"):
        other = world.add(name, Role.DECODE)
        other.config = other.config.with_fields(max_batch_requests=3)
    await world.supervisor.take_over(Takeover())

    async def fail(_change: SizeChange) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(world.supervisor.operator, "resize", fail)
    world.supervisor.started.set()
    await until(lambda: min(world.serving.get(name, 0) for name in ("decode-0", "decode-1")) > 7)
    assert "there are more workers than requested" in caplog.text
    assert "a defect" in caplog.text
    await world.supervisor.stop(end_workers=True)


async def test_workers_receive_their_assignments_although_one_call_failed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "AGAIN_S", 0.0)
    world = World()
    assignments, began = world.supervisor._assignments, []
    run = assignments.run

    async def fail_once() -> None:
        began.append(1)
        if len(began) == 1:
            raise KeyError("a defect")
        await run()

    monkeypatch.setattr(assignments, "run", fail_once)
    await world.supervisor.take_over(Takeover())
    await until(lambda: len(began) == 2)
    assert "sending workers their assignments failed; restarting it" in caplog.text
    await world.supervisor.stop(end_workers=True)
    assert len(began) == 2


async def test_rescheduled_workers_come_back_although_no_worker_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them were on the node that leaves."""
    left = asyncio.Event()

    async def node_is_up(_address: str) -> bool:
        return not left.is_set()

    monkeypatch.setattr(supervisor, "node_is_up", node_is_up)
    monkeypatch.setattr(operator, "NODE_LOOK_S", 0.001)
    world = World()
    await world.supervisor.take_over(Takeover(rescheduling=(("prefill-0", "10.0.0.9"), ("decode-0", "10.0.0.9"))))
    await asyncio.sleep(0.02)
    assert not world.running
    left.set()
    await until(lambda: len(world.serving) == 2)
    await world.supervisor.stop(end_workers=True)


async def test_workers_live_on_when_their_takeover_is_abandoned() -> None:
    world = World()
    running = [world.add("prefill-0", Role.PREFILL), world.add("decode-0", Role.DECODE)]
    for worker in running:
        worker.follows.clear()
    taking = asyncio.ensure_future(world.supervisor.take_over(Takeover()))
    await until(lambda: len(world.followed) == 2)
    await asyncio.sleep(0.01)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    await world.supervisor.stop(end_workers=False)
    assert world.running == running


async def test_a_controller_that_replaces_a_dead_one_keeps_what_operators_changed() -> None:
    """The config has one worker of each role; there were two that decode, and one of them was drained."""
    world = World()
    await world.supervisor.take_over(Takeover())
    await until(lambda: all(keeper.phase is Phase.SERVING for keeper in world.supervisor.fleet.supervisors.values()))
    await world.supervisor.operator.resize(SizeChange(prefill=1, decode=2, wait_s=60.0))
    await world.supervisor.operator.drain_worker("decode-1", 0.0, restart=False, force=False)
    await until(lambda: world.supervisor.fleet.supervisors["decode-1"].phase is Phase.DRAINED)
    serving, state = world.serving, world.supervisor.state
    assert state.takeover == Takeover(("decode-1",))
    await world.supervisor.stop(end_workers=False)
    health = Health("router", Phase.SERVING, 7, 1, 0, "")

    heir = world.move_in(before=ClusterHealth(health, "a:1", "a:2", (), state=state))
    await heir.take_over(Takeover())
    assert world.serving == serving
    assert heir.state.topology == state.topology
    assert {slot.worker_id for slot in heir.state.slots} == {"prefill-0", "decode-0", "decode-1"}
    assert heir.fleet.supervisors["decode-1"].phase is Phase.DRAINED
    heir.started.set()
    await heir.operator.drain_worker("decode-1", 0.0, restart=True, force=False)
    assert world.serving.keys() == {"prefill-0", "decode-0", "decode-1"}
    await heir.stop(end_workers=True)
