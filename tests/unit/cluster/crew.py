"""A cluster's workers without processes: they register, change and drain on command, as fast as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tandem.cluster.operations.assignments import Assignments
from tandem.cluster.operations.operator import Operator
from tandem.cluster.operations.worker_slots import Fleet
from tandem.cluster.supervision.health import Phase
from tandem.cluster.supervision.modes import Topology
from tandem.cluster.supervision.process_supervisor import Process, ProcessSupervisor
from tandem.cluster.supervision.registry import Registry
from tandem.cluster.supervision.roles import Slot, another
from tandem.protocol.errors import Unavailable
from tandem.protocol.messages import Assignment, ModelFacts, PeerRef, Role, WorkerInfo
from tandem.protocol.mode import Mode
from tandem.settings.cluster import ClusterSettings

P, D, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
FACTS = ModelFacts("m", 10, 10, (), "float32")
DISAGGREGATED = Topology(Mode.DISAGGREGATED, 1)
CONFIG = ClusterSettings.of(Path("model"))


class Workers:
    """Workers that take their assignments as fast as the test says, and a log of the memberships meanwhile."""

    def __init__(self, roles: dict[str, Role], topology: Topology, prefill_only: str = "") -> None:
        self.registry = Registry()
        self.busy: set[str] = set()
        """The workers whose halves do not become empty."""
        self.deaf: set[str] = set()
        self.seen: list[tuple[str, dict[str, Role | None]]] = []
        self.infos: dict[str, WorkerInfo] = {}
        self.assignments = Assignments(self.registry, topology, roles, self._send_assignment, prefill_only)
        for worker_id, role in roles.items():
            self.start(worker_id, 1, topology.assignment(role))
        self._tasks = [asyncio.ensure_future(self._note()), asyncio.ensure_future(self.assignments.run())]

    def start(self, worker_id: str, incarnation: int, assignment: Assignment) -> None:
        peer = PeerRef(worker_id, incarnation)
        self._say(WorkerInfo(peer, assignment.role, "a:1", FACTS, 8, 4, 8, 16, "cpu", "fake", assignment=assignment))

    def die(self, worker_id: str) -> None:
        self.registry.unregister(self.infos.pop(worker_id).peer)

    def finish(self, worker_id: str) -> None:
        """Completes the remaining requests of a worker."""
        self.busy.discard(worker_id)
        info = self.infos[worker_id]
        assert info.assignment is not None
        self._say(replace(info, role=info.assignment.role, closing=None))

    @property
    def roles(self) -> dict[str, Role | None]:
        return {info.peer.worker_id: info.open for info in self.registry.membership().workers}

    def check(self) -> None:
        """Checks that at every moment some worker took prefill and some worker decode."""
        for mode, roles in self.seen:
            taken = [role for role in roles.values() if role is not None]
            assert any(role.prefills for role in taken), (mode, roles)
            assert any(role.decodes for role in taken), (mode, roles)
            if mode == Mode.COLOCATED:
                assert all(role is BOTH for role in taken), (mode, roles)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send_assignment(self, info: WorkerInfo, assignment: Assignment, _grace_s: float) -> None:
        name = info.peer.worker_id
        if name in self.deaf:
            raise Unavailable(f"{name} does not answer")
        now = self.infos[name]
        role = now.role | assignment.role
        self._say(replace(now, role=role, closing=role.without(assignment.role), assignment=assignment))
        if name not in self.busy:
            asyncio.get_running_loop().call_soon(self.finish, name)

    def _say(self, info: WorkerInfo) -> None:
        self.infos[info.peer.worker_id] = info
        self.registry.register(info)

    async def _note(self) -> None:
        async for membership in self.registry.watch():
            self.seen.append((membership.mode, {info.peer.worker_id: info.open for info in membership.workers}))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


class ProcessOf(Process):
    """A worker's process, which starts once there is capacity and ends when it has drained."""

    def __init__(self, crew: Crew, worker_id: str, incarnation: int) -> None:
        self._crew = crew
        self._worker_id = worker_id
        self._incarnation = incarnation
        self.over = asyncio.Event()

    async def placed(self) -> None:
        await self._crew.room.wait()

    async def pid(self) -> int:
        return 1

    async def start(self) -> None:
        workers = self._crew.workers
        workers.start(self._worker_id, self._incarnation, workers.assignments.wanted(self._worker_id))

    async def ended(self) -> str:
        await self.over.wait()
        return "it has drained"

    async def works(self) -> None:
        return

    async def kill(self) -> None:
        raise AssertionError("it never hangs")

    async def end(self, grace_s: float) -> None:
        self.over.set()


class Crew:
    """A fleet of such workers, with an operator over it."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.room = asyncio.Event()
        """Unset: no node has capacity for another worker."""
        self.room.set()
        self.drains = asyncio.Event()
        """Unset: a drain that has begun does not end."""
        self.drains.set()
        self.nodes_up = True
        self.drained: list[str] = []
        self.released: list[str] = []
        """The workers whose slots were released."""
        self.processes: dict[str, ProcessOf] = {}
        self.fleet = Fleet(self._keeper, self._new_slot, self._release)
        self.supervisors = self.fleet.supervisors
        self.operator = Operator(workers.registry, workers.assignments, self.fleet, self, self._node_is_up)

    @classmethod
    async def of(cls, workers: Workers) -> Crew:
        """Creates a crew and waits until all of its workers serve."""
        crew = cls(workers)
        for name, info in workers.infos.items():
            crew.fleet.add(Slot(name, info.role, "cpu"))
        await until(lambda: all(supervisor.phase is Phase.SERVING for supervisor in crew.supervisors.values()))
        return crew

    async def drain(self, info: WorkerInfo, _grace_s: float) -> None:
        await self.drains.wait()
        name = info.peer.worker_id
        assert self.supervisors[name].phase is Phase.DRAINING
        self.drained.append(name)
        self.processes[name].over.set()

    async def stop(self) -> None:
        await self.fleet.stop()
        await self.workers.stop()

    async def _release(self, slot: Slot) -> None:
        self.released.append(slot.worker_id)

    def _keeper(self, slot: Slot) -> ProcessSupervisor:
        name = slot.worker_id

        async def spawn(incarnation: int) -> Process:
            self.processes[name] = ProcessOf(self, name, incarnation)
            return self.processes[name]

        return ProcessSupervisor(name, spawn, lambda incarnation: self._died(PeerRef(name, incarnation)))

    def _died(self, peer: PeerRef) -> None:
        self.workers.infos.pop(peer.worker_id, None)
        self.workers.registry.unregister(peer)

    def _new_slot(self, role: Role, slots: Sequence[Slot]) -> Slot:
        return another(CONFIG, role, slots, gpus=0)

    async def _node_is_up(self, _address: str) -> bool:
        return self.nodes_up
