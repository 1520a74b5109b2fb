"""Operators' changes while requests run: a change of mode, more or fewer workers, and drains."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Protocol

from tandem.cluster.background import Changes
from tandem.cluster.operations.assignments import Assignments
from tandem.cluster.operations.worker_slots import Fleet
from tandem.cluster.supervision.health import Phase
from tandem.cluster.supervision.modes import ModeChange
from tandem.cluster.supervision.process_supervisor import WAITS_FOR_NODE, ProcessSupervisor
from tandem.cluster.supervision.registry import Registry
from tandem.cluster.supervision.roles import Slot
from tandem.cluster.supervision.size import SizeChange, Steps
from tandem.cluster.supervision.takeover import Takeover
from tandem.protocol.errors import FailedPrecondition, NotFound, TandemError
from tandem.protocol.messages import Absence, Role, WorkerInfo

END_S = 20.0
"""Timeout for the process of a drained worker to end, in seconds."""


class Drains(Protocol):
    """The call that drains a worker."""

    async def drain(self, info: WorkerInfo, grace_s: float) -> None:
        """Drain a worker; return when it has no requests left."""


class Draining:
    """The drains in progress. Belongs to the event loop."""

    def __init__(self, registry: Registry, assignments: Assignments, workers: Drains) -> None:
        self._registry = registry
        self._assignments = assignments
        self._workers = workers
        self._running: set[ProcessSupervisor] = set()

    def __bool__(self) -> bool:
        """Return True while any drain is in progress."""
        return bool(self._running)

    def registered(self, worker_id: str) -> WorkerInfo | None:
        """Return the registration of the worker of this name; None = it does not serve."""
        members = self._registry.membership().workers
        return next((info for info in members if info.peer.worker_id == worker_id), None)

    def may_drain(self, supervisor: ProcessSupervisor, *, force: bool) -> WorkerInfo:
        """Check that a worker may be drained, and return its registration.

        Raises FailedPrecondition if the worker does not serve or, unless `force` is set, if no other worker serves.
        """
        members = {info.peer.worker_id: info for info in self._registry.membership().workers if info.open is not None}
        info = members.pop(supervisor.name, None)
        if info is None or supervisor.phase is not Phase.SERVING:
            raise FailedPrecondition(
                f"{supervisor.name} is {supervisor.phase} and cannot be drained; look at `tandem status`"
            )
        if not members and not force:
            raise FailedPrecondition(
                f"{supervisor.name} is the only worker that serves, requests would fail; add --force to drain it anyway"
            )
        return info

    async def run(self, supervisor: ProcessSupervisor, info: WorkerInfo, grace_s: float) -> None:
        """Drain a worker, end it after `grace_s` seconds at the latest, and return when its process is gone."""
        self._running.add(supervisor)
        try:
            await self._assignments.cover_role_of(supervisor.name)
            supervisor.retire()
            await self._drained(supervisor, info, grace_s)
        finally:
            self._running.discard(supervisor)

    async def _drained(self, supervisor: ProcessSupervisor, info: WorkerInfo, grace_s: float) -> None:
        try:
            await self._workers.drain(info, grace_s)
        except TandemError as error:
            log.warning("%s did not drain: %s", supervisor.name, error.message)
            supervisor.end_now()
        await supervisor.until(Phase.DRAINED, END_S)


log = logging.getLogger(__name__)

BACK_S = 180.0
"""Timeout for a restarted worker to serve, in seconds."""
LOOK_S = 0.05
NODE_LOOK_S = 1.0
"""Interval between checks of a node that is about to leave, in seconds."""


class Operator:
    """Executes operators' changes; a running change continues even if its caller no longer waits.

    Belongs to the controller's event loop.
    """

    def __init__(
        self,
        registry: Registry,
        assignments: Assignments,
        fleet: Fleet,
        workers: Drains,
        node_is_up: Callable[[str], Awaitable[bool]],
    ) -> None:
        """Create the operator; `node_is_up` returns True if a node of this address is in the cluster."""
        self._registry = registry
        self._assignments = assignments
        self._fleet = fleet
        self._supervisors = fleet.supervisors
        self._draining = Draining(registry, assignments, workers)
        self._node_is_up = node_is_up
        self._awaited: set[ProcessSupervisor] = set()
        """The supervisors of workers that are expected to serve but do not serve now, because they start or restart."""
        self._rescheduling: dict[str, str] = {}
        """For each worker that will start on another node, the address of its old node, which has to leave first.

        An entry exists from the start of the worker's drain.
        """
        self._leaving: set[str] = set()
        """Workers that are being removed for good."""
        self._one_size_at_a_time = asyncio.Lock()
        self._changes = Changes("a change of the workers")
        registry.wanted = self.wanted

    @property
    def coming(self) -> int:
        """The number of workers that are expected to serve but do not serve now, because they start or restart."""
        return sum(self._is_coming(supervisor) for supervisor in self._supervisors.values())

    def wanted(self) -> dict[str, Role]:
        """Return the workers that serve or will serve without an operator's action, with their roles."""
        return {
            name: self._assignments.wanted(name).role
            for name, supervisor in self._supervisors.items()
            if name not in self._leaving and (supervisor in self._awaited or supervisor.will_serve)
        }

    def absent(self) -> tuple[Absence, ...]:
        """Return the workers that do not serve now, with reasons."""
        lacks = ((supervisor, supervisor.health().lack) for supervisor in self._supervisors.values())
        return tuple(Absence(supervisor.name, lack, self._is_coming(supervisor)) for supervisor, lack in lacks if lack)

    def _is_coming(self, supervisor: ProcessSupervisor) -> bool:
        return supervisor in self._awaited or supervisor.phase in {Phase.STARTING, Phase.WAITING}

    async def finish(self) -> Takeover:
        """Complete running drains, cancel pending waits, and return the state that the next controller needs."""
        while self._draining:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        takeover = self.takeover()
        await asyncio.gather(*self._changes.cancel(), return_exceptions=True)
        self._awaited.clear()
        self._rescheduling.clear()
        return takeover

    def takeover(self) -> Takeover:
        """Return the state that another controller would need to take over the workers now."""
        drained = [name for name, supervisor in self._supervisors.items() if supervisor.phase is Phase.DRAINED]
        going = {*self._leaving, *(supervisor.name for supervisor in self._awaited)}
        return Takeover(tuple(name for name in drained if name not in going), tuple(self._rescheduling.items()))

    def staying(self, slots: Iterable[Slot]) -> tuple[Slot, ...]:
        """Return the slots whose workers are not being removed for good."""
        return tuple(slot for slot in slots if slot.worker_id not in self._leaving)

    def resume(self, takeover: Takeover) -> None:
        """Continue the rescheduling that another controller began."""
        for name, node in takeover.rescheduling:
            if (supervisor := self._supervisors.get(name)) is not None and not supervisor.wanted:
                self._awaited.add(supervisor)
                self._changes.begin(self._come_back_elsewhere(supervisor, node))

    async def set_mode(self, change: ModeChange) -> tuple[WorkerInfo, ...]:
        """Change the mode and return the current workers; see `Assignments.set_mode`."""
        await self._changes.to_its_end(self._assignments.set_mode(change))
        return self._registry.membership().workers

    async def drain_worker(
        self, worker_id: str, grace_s: float, *, restart: bool, force: bool, node_leaves: bool = False
    ) -> None:
        """Drain a worker: let it finish requests for `grace_s` seconds, move the rest to other workers, and end it.

        With `restart` the worker starts again, at once if it is already drained, and the call returns when it serves.
        With `node_leaves` the worker starts on another node once its node has left. With neither, it stays drained.

        Raises NotFound for an unknown name. Raises FailedPrecondition if the worker does not serve or, unless `force`
        is set, is the last worker that serves; and without `restart`, if it is already drained.
        """
        supervisor = self._supervisors.get(worker_id)
        if supervisor is None:
            raise NotFound(f"no worker is called {worker_id!r}; there are {', '.join(self._supervisors)}")
        if restart:
            work = self._drain_and_restart(supervisor, grace_s, force=force)
        elif node_leaves:
            work = self._drain_and_move(supervisor, grace_s, force=force)
        else:
            work = self._drain(supervisor, grace_s, force=force)
        await self._changes.to_its_end(work)

    async def resize(self, change: SizeChange) -> tuple[WorkerInfo, ...]:
        """Start or drain workers and change roles until the cluster has the size that `change` wants.

        Workers that `drain_worker` drained do not count. Returns the workers of the cluster afterwards. Raises
        InvalidArgument for an impossible size, and FailedPrecondition if this host lacks the capacity. Raises
        DeadlineExceeded if a worker does not serve within `wait_s` seconds; it will serve when it can, for instance
        once a node with capacity joins.
        """
        await self._changes.to_its_end(self._resize(change))
        coming = sorted(self._awaited, key=lambda supervisor: supervisor.name)
        await asyncio.gather(*(self._counted_in(supervisor, change.wait_s) for supervisor in coming))
        return self._registry.membership().workers

    async def _resize(self, change: SizeChange) -> None:
        """Execute a resize; return when all removed workers have ended and all role changes are done."""
        async with self._one_size_at_a_time:
            here, awaited = await self._counted_workers()
            now = Counter([*here.values(), *awaited.values()])
            steps = Steps.to(change.over(self._assignments.topology.mode, now), here, awaited)
            for slot in self._fleet.new_slots(steps.add):
                self._begin(slot)
            results = await asyncio.gather(
                *(self._leave(name, change.grace_s) for name in steps.leave), return_exceptions=True
            )
            for error in filter(None, results):
                raise error
            await self._assignments.flip(steps.into_prefill, change.grace_s)

    async def _counted_workers(self) -> tuple[dict[str, Role], dict[str, Role]]:
        """Return present and awaited workers with their roles, in the order in which they should be removed."""
        roles = await self._assignments.roles()
        here, awaited = {}, {}
        newest_first = list(self._supervisors.items())[::-1]
        for name, supervisor in sorted(newest_first, key=lambda pair: _worth(pair[1])):
            if supervisor in self._awaited:
                awaited[name] = roles[name]
            elif supervisor.phase not in {Phase.DRAINING, Phase.DRAINED, Phase.STOPPED}:
                here[name] = roles[name]
        return here, awaited

    def _begin(self, slot: Slot) -> None:
        self._assignments.expect(slot.worker_id, slot.role)
        supervisor = self._fleet.add(slot)
        self._awaited.add(supervisor)
        self._registry.look_again()
        self._changes.begin(self._arrive(supervisor))

    async def _counted_in(self, supervisor: ProcessSupervisor, within_s: float) -> None:
        """Wait until a worker serves, and until `_arrive` has added it back to the topology.

        `within_s` limits only the first wait. Raises DeadlineExceeded if the worker does not serve in time.
        """
        await supervisor.until(Phase.SERVING, within_s)
        while supervisor in self._awaited:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    async def _arrive(self, supervisor: ProcessSupervisor) -> None:
        """Wait until a worker serves and add it back to the topology, or return when its supervisor has stopped."""
        try:
            await supervisor.until(Phase.SERVING)
            await self._assignments.restore_worker(supervisor.name)
        except TandemError as error:
            log.info("%s: %s", supervisor.name, error.message)
        finally:
            self._awaited.discard(supervisor)

    async def _leave(self, worker_id: str, grace_s: float) -> None:
        self._leaving.add(worker_id)
        self._registry.look_again()
        try:
            await self._leave_for_good(worker_id, grace_s)
        finally:
            self._leaving.discard(worker_id)

    async def _leave_for_good(self, worker_id: str, grace_s: float) -> None:
        supervisor = self._supervisors[worker_id]
        info = self._draining.registered(worker_id)
        if supervisor.phase is Phase.SERVING and info is not None:
            await self._draining.run(supervisor, info, grace_s)
        else:
            if supervisor.phase is Phase.DRAINING:
                await supervisor.until(Phase.DRAINED, grace_s + END_S)
            await self._assignments.cover_role_of(worker_id)
        await self._fleet.remove(worker_id)
        self._assignments.forget(worker_id)
        self._awaited.discard(supervisor)

    async def _drain(self, supervisor: ProcessSupervisor, grace_s: float, *, force: bool) -> None:
        if supervisor.phase is Phase.DRAINED:
            raise FailedPrecondition(f"{supervisor.name} was drained before; add --restart to start it again")
        await self._draining.run(supervisor, self._draining.may_drain(supervisor, force=force), grace_s)

    async def _drain_and_restart(self, supervisor: ProcessSupervisor, grace_s: float, *, force: bool) -> None:
        if supervisor.phase is not Phase.DRAINED:
            info = self._draining.may_drain(supervisor, force=force)
            with self._counting_on(supervisor):
                await self._draining.run(supervisor, info, grace_s)
        self._awaited.add(supervisor)
        supervisor.restart()
        self._registry.look_again()
        arriving = self._changes.begin(self._arrive(supervisor))
        await supervisor.until(Phase.SERVING, BACK_S)
        await arriving

    async def _drain_and_move(self, supervisor: ProcessSupervisor, grace_s: float, *, force: bool) -> None:
        """Drain a worker, return, and start the worker on another node in the background."""
        info = self._draining.may_drain(supervisor, force=force)
        node = self._rescheduling[supervisor.name] = info.address.rpartition(":")[0]
        try:
            with self._counting_on(supervisor):
                await self._drain(supervisor, grace_s, force=force)
        except BaseException:
            self._rescheduling.pop(supervisor.name, None)
            raise
        self._changes.begin(self._come_back_elsewhere(supervisor, node))

    @contextlib.contextmanager
    def _counting_on(self, supervisor: ProcessSupervisor) -> Iterator[None]:
        """Count the worker among those expected to serve while the body runs; afterwards too, unless the body fails."""
        self._awaited.add(supervisor)
        try:
            yield
        except BaseException:
            self._awaited.discard(supervisor)
            raise

    async def _come_back_elsewhere(self, supervisor: ProcessSupervisor, node: str) -> None:
        self._rescheduling[supervisor.name] = node
        try:
            while await self._may_be_up(node):  # noqa: ASYNC110
                await asyncio.sleep(NODE_LOOK_S)
        finally:
            self._rescheduling.pop(supervisor.name, None)
        if supervisor.wanted:
            return  # it was restarted or removed in the meantime
        log.info("%s, where %s was, has left; it starts elsewhere", node, supervisor.name)
        supervisor.restart()
        await self._arrive(supervisor)

    async def _may_be_up(self, node: str) -> bool:
        try:
            return await self._node_is_up(node)
        except Exception:
            log.exception("cannot determine if %s has left; asking again", node)
            return True


def _worth(supervisor: ProcessSupervisor) -> int:
    """Return a worker's rank for removal, lowest first: 0 = waits for a node, 1 = does not serve, 2 = serves."""
    if supervisor.phase is Phase.SERVING:
        return 2
    return int(supervisor.health().stage != WAITS_FOR_NODE)
