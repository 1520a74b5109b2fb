"""The wanted assignment of each worker, and the loop that sends it to the workers.

A worker that registers with an assignment other than the wanted one is sent the wanted one. This covers every change,
and also a worker that restarted during a change.

Each worker has a prefill scheduler and a decode scheduler, and its role says which of them are open. A change of mode
has three steps, so that at every moment some worker accepts each kind of request:

1. All schedulers that the new mode needs are opened.
2. Routers change their mode.
3. Schedulers that the new mode does not need are closed.

The last step may take as long as requests run. Another change or a drain does not wait for this step, but starts
from the wanted assignments.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace

from tandem.cluster.supervision.modes import ModeChange, Topology, assign
from tandem.cluster.supervision.registry import Registry
from tandem.protocol.errors import DeadlineExceeded, FailedPrecondition, TandemError
from tandem.protocol.messages import Assignment, Membership, PeerRef, Role, WorkerInfo
from tandem.protocol.mode import Mode

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Seconds before an assignment that a worker did not accept is sent again."""
OPEN_S = 10.0
"""Timeout for all workers to open the schedulers that a new mode needs, in seconds; if it expires, nothing changes."""
STABLE_TIMEOUT_S = 35.0
"""Timeout for closing schedulers to finish, in seconds after the grace: a transfer may take 30 s to end."""

SendAssignment = Callable[[WorkerInfo, Assignment, float], Awaitable[None]]
"""Sends a worker its assignment and the number of seconds that closing schedulers have for their requests.

Raises a TandemError on failure.
"""


class Assignments:
    """The wanted assignments of all workers; `run` sends them. Belongs to the event loop."""

    def __init__(
        self,
        registry: Registry,
        topology: Topology,
        roles: Mapping[str, Role],
        send: SendAssignment,
        prefill_only: str = "",
    ) -> None:
        """Start with `roles`, the initial role of each worker; `send` sends an assignment to a worker.

        `prefill_only` is the option with which prefill workers cannot decode
        (`ClusterSettings.prefill_only_option`); "" if they can.
        """
        self.topology = topology
        """The current topology of the cluster."""
        self._registry = registry
        self._send = send
        self._prefill_only = prefill_only
        self._wanted = {worker_id: topology.assignment(role) for worker_id, role in roles.items()}
        self._absent: dict[str, Role] = {}
        """The workers that do not serve and are not counted in `topology`, with the role that each returns to."""
        self._grace_s = 0.0
        self._sent: dict[PeerRef, Assignment] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()
        registry.set_mode(topology.mode)

    def inherit(self, topology: Topology, roles: Mapping[str, Role], drained: Collection[str] = ()) -> None:
        """Replace the known workers by those in `roles`, which has each worker's current or initial role.

        A worker keeps its role if `topology` needs that role. Workers in `drained` are absent until `restore_worker` is
        called for them.
        """
        assignments = assign(topology, roles)
        self._wanted, self._sent = assignments, {}
        self._absent = {worker_id: assignments[worker_id].role for worker_id in drained}
        for role in self._absent.values():
            topology = _with_more(topology, role, -1)
        self.topology = topology
        here = self._here()
        # Without the drained workers one phase may have no worker; the present workers then do both.
        if not all(_played(phase, here.values()) for phase in (Role.PREFILL, Role.DECODE)):
            self._wanted.update(self._in_both_roles(here))
        self._registry.set_mode(topology.mode)
        self._poll()

    def wanted(self, worker_id: str) -> Assignment:
        """Return the wanted assignment of this worker; a worker that is not running starts with it."""
        return self._wanted[worker_id]

    def topology_with(self, worker_ids: Collection[str]) -> Topology:
        """Return the topology that results when the absent workers among `worker_ids` serve again."""
        topology = self.topology
        for worker_id in self._absent.keys() & set(worker_ids):
            topology = _with_more(topology, self._absent[worker_id], 1)
        return topology

    async def roles(self) -> dict[str, Role]:
        """Return every worker's own role, including absent workers.

        A worker that stands in for another one has both schedulers open, but its own role stays the same.
        """
        async with self._one_at_a_time:
            return {worker_id: self._role(worker_id) for worker_id in self._wanted}

    def expect(self, worker_id: str, role: Role) -> None:
        """Add a worker that has yet to start; call `restore_worker` once it serves."""
        self._wanted[worker_id] = self.topology.assignment(role)
        self._absent[worker_id] = role

    def forget(self, worker_id: str) -> None:
        """Remove a worker that will not serve again."""
        self._wanted.pop(worker_id, None)
        self._absent.pop(worker_id, None)

    async def run(self) -> None:
        """Send workers their assignments, until cancelled."""
        try:
            async for _ in self._registry.watch():
                self._poll()
        finally:
            for task in self._sending:
                task.cancel()
            self._sent = {}

    async def set_mode(self, change: ModeChange) -> None:
        """Change the mode; return when every serving worker has its new assignment.

        Raises InvalidArgument for an impossible change, FailedPrecondition if prefill workers cannot decode, and
        DeadlineExceeded if workers do not adopt their assignments in time. If the needed schedulers did not open in
        time, nothing has changed; otherwise the mode has changed, and the remaining workers adopt their assignments
        when they can.
        """
        async with self._one_at_a_time:
            await self._share(change.over(self.topology, len(self._here())), change.grace_s)
        await self._wait_until_stable(change.grace_s)

    async def flip(self, into_prefill: int, grace_s: float) -> None:
        """Turn `into_prefill` decode workers into prefill workers; a negative number turns prefill into decode workers.

        It has no effect unless the mode is disaggregated. Raises FailedPrecondition if a role would be left without
        workers or if prefill workers cannot decode; other errors are those of `set_mode`.
        """
        async with self._one_at_a_time:
            if self.topology.mode is not Mode.DISAGGREGATED or not into_prefill:
                return
            prefill, here = self.topology.prefill + into_prefill, len(self._here())
            if not 1 <= prefill < here:
                raise FailedPrecondition(f"{here} workers serve, of which {prefill} cannot prefill; try again later")
            await self._share(replace(self.topology, prefill=prefill), grace_s)
        await self._wait_until_stable(grace_s)

    async def _share(self, topology: Topology, grace_s: float) -> None:
        """Apply a topology: change the assignments of present workers, and the roles that absent workers return to.

        Returns once the schedulers that the topology needs are open; the others close later.
        """
        if self._prefill_only:
            raise FailedPrecondition(
                f"prefill workers cannot decode with this {self._prefill_only}; to change roles, start the cluster with"
                f" {self._prefill_only} 1"
            )
        before = self._here()
        assignments = assign(topology, {worker_id: assignment.role for worker_id, assignment in before.items()})
        self._grace_s = grace_s
        await self._open(before, assignments)
        self.topology = topology
        self._registry.set_mode(topology.mode)
        for worker_id, role in self._absent.items():
            self._absent[worker_id] = _role_when_back(topology, role)
            self._wanted[worker_id] = topology.assignment(self._absent[worker_id])
        self._want(assignments)

    async def cover_role_of(self, worker_id: str) -> None:
        """Mark a worker as absent; if no other worker has its role, all present workers open both schedulers.

        Workers that cannot decode keep their role: while the only decode worker is absent, requests wait for it. Does
        nothing if the worker is absent already. Raises DeadlineExceeded, with everything unchanged, if the workers do
        not open the schedulers in time.
        """
        async with self._one_at_a_time:
            if worker_id in self._absent:
                return
            topology, role = self.topology, self._role(worker_id)
            self._absent[worker_id] = role
            self.topology = _with_more(topology, role, -1)
            before = self._here()
            missing = [phase for phase in (Role.PREFILL, Role.DECODE) if not _played(phase, before.values())]
            if missing and before:
                try:
                    await self._open(before, self._in_both_roles(before))
                except DeadlineExceeded:
                    del self._absent[worker_id]
                    self.topology = topology
                    raise

    async def restore_worker(self, worker_id: str) -> None:
        """Add a worker that serves back to the topology; workers that stood in for it return to their own roles.

        Does nothing if the worker was not marked as absent.
        """
        async with self._one_at_a_time:
            role = self._absent.pop(worker_id, None)
            if role is None:
                return
            self.topology = _with_more(self.topology, role, 1)
            here = {present_id: assignment.role for present_id, assignment in self._here().items()}
            if not (self.topology.mode is Mode.DISAGGREGATED and 1 <= self.topology.prefill < len(here)):
                return
            self._want(assign(self.topology, here))
        await self._wait_until_stable(self._grace_s)

    def _here(self) -> dict[str, Assignment]:
        """Return the wanted assignments of the present workers."""
        return {
            worker_id: assignment for worker_id, assignment in self._wanted.items() if worker_id not in self._absent
        }

    def _in_both_roles(self, assignments: Mapping[str, Assignment]) -> dict[str, Assignment]:
        """Return the assignments with both roles for every worker that can have both."""
        return {
            worker_id: assignment
            if assignment.role is Role.PREFILL and self._prefill_only
            else replace(assignment, role=Role.BOTH)
            for worker_id, assignment in assignments.items()
        }

    def _role(self, worker_id: str) -> Role:
        """Return a worker's own role, even while it has both roles because it stands in for an absent worker."""
        role = self._absent.get(worker_id, self._wanted[worker_id].role)
        if role is not Role.BOTH or self.topology.mode is not Mode.DISAGGREGATED:
            return role
        return Role.PREFILL if self.topology.prefill else Role.DECODE

    async def _open(self, before: Mapping[str, Assignment], assignments: Mapping[str, Assignment]) -> None:
        """Open the schedulers of the new assignments while those of the old ones stay open.

        Raises DeadlineExceeded, with everything unchanged, if a worker does not open them within `OPEN_S` seconds.
        """
        self._want(
            {
                worker_id: replace(assignment, role=assignment.role | before[worker_id].role)
                for worker_id, assignment in assignments.items()
            }
        )
        # Until routers follow the new mode, each worker has its old and its new role, so every kind of work finds a
        # worker.
        late = await self._late(lambda info: not _opened(info, self._wanted[info.peer.worker_id]), OPEN_S)
        if late:
            self._want(before)
            raise DeadlineExceeded(f"{late} did not open what the new mode needs; nothing has changed, try again")

    async def _wait_until_stable(self, grace_s: float) -> None:
        """Wait until every serving worker has its wanted assignment, which a later change may have set.

        Raises DeadlineExceeded after `grace_s` + `STABLE_TIMEOUT_S` seconds.
        """
        late = await self._late(lambda info: not _settled(info, self._wanted), grace_s + STABLE_TIMEOUT_S)
        if late:
            raise DeadlineExceeded(f"the mode has changed; {late} still finishes what it had, and follows then")

    def _want(self, assignments: Mapping[str, Assignment]) -> None:
        self._wanted.update(assignments)
        self._poll()

    def _poll(self) -> None:
        """Send the wanted assignment to each worker that is registered with a different one."""
        members = self._registry.membership().workers
        self._sent = {info.peer: sent for info in members if (sent := self._sent.get(info.peer)) is not None}
        for info in members:
            assignment = self._wanted.get(info.peer.worker_id)
            if assignment is None or info.open is None or assignment == self._sent.get(info.peer, info.assignment):
                continue
            self._sent[info.peer] = assignment
            task = asyncio.ensure_future(self._send_until_delivered(info, assignment))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send_until_delivered(self, info: WorkerInfo, assignment: Assignment) -> None:
        """Send an assignment until it is delivered, another one is wanted, or the worker is gone."""
        while self._sent.get(info.peer) == assignment:
            try:
                await self._send(info, assignment, self._grace_s)
                return
            except TandemError as error:
                log.warning("could not send %s its assignment, %s: %s", info.peer.worker_id, assignment, error.message)
            except Exception:
                log.exception("could not send %s its assignment, %s", info.peer.worker_id, assignment)
            await asyncio.sleep(RETRY_S)

    async def _late(self, is_late: Callable[[WorkerInfo], bool], within_s: float) -> str:
        """Wait until `is_late` is False for every serving worker.

        Returns the names of the workers that are late after `within_s` seconds, "" = none.
        """
        late: list[str] = []
        try:
            async with asyncio.timeout(within_s):
                async for membership in self._registry.watch():
                    late = self._late_workers(membership, is_late)
                    if not late:
                        return ""
        except TimeoutError:
            log.warning("%s did not take the new assignment within %.1f s", ", ".join(late), within_s)
        return ", ".join(late)

    def _late_workers(self, membership: Membership, is_late: Callable[[WorkerInfo], bool]) -> list[str]:
        asked = (info for info in membership.workers if info.open is not None and info.peer.worker_id in self._wanted)
        return [info.peer.worker_id for info in asked if info.peer.worker_id not in self._absent and is_late(info)]


def _with_more(topology: Topology, role: Role, more: int) -> Topology:
    """Return the topology with `more` additional workers of this role."""
    if topology.mode is not Mode.DISAGGREGATED or role is not Role.PREFILL:
        return topology
    return replace(topology, prefill=topology.prefill + more)


def _role_when_back(topology: Topology, role: Role) -> Role:
    """Return the role that an absent worker has once it serves again."""
    if topology.prefill == 0:
        return Role.BOTH
    return Role.DECODE if role is Role.BOTH else role


def _played(phase: Role, assignments: Iterable[Assignment]) -> bool:
    return any(assignment.role | phase is assignment.role for assignment in assignments)


def _opened(info: WorkerInfo, assignment: Assignment) -> bool:
    """Return True if the worker has `assignment` and all schedulers that it needs are open; others may be open too."""
    return info.open is not None and info.open | assignment.role is info.open and info.assignment == assignment


def _settled(info: WorkerInfo, assignments: Mapping[str, Assignment]) -> bool:
    assignment = assignments.get(info.peer.worker_id)
    return assignment is None or (
        info.assignment == assignment and info.closing is None and info.role is assignment.role
    )
