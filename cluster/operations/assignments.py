"""What each worker is to do, and who sees to it that it does.

A worker that registers with another assignment than it is to have is told so, whenever that is: after a change, and after a
restart that crossed one. A change of mode goes in three steps, so that at every moment somebody takes every kind of
work: all halves that are going to be needed open; routers change their mode; what is not needed any more closes. That
last step may take as long as answers do, and nothing else waits for it: another change, or a worker that leaves, begins
from what is wanted.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace

from cluster.supervision.modes import ModeChange, Sharing, assign
from cluster.supervision.registry import Registry
from wire.errors import DeadlineExceeded, FailedPrecondition, TandemError
from wire.messages import Assignment, Membership, PeerRef, Role, WorkerInfo
from wire.mode import Mode

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Before a worker that did not take its assignment is told again."""
OPEN_S = 10.0
"""Within which all workers open the halves that a new mode needs, else nothing changes."""
SETTLE_S = 35.0
"""After the grace, in which halves give up what they still have: a transfer may take 30 s to be over."""

Tell = Callable[[WorkerInfo, Assignment, float], Awaitable[None]]
"""Tell a worker its assignment, and how many seconds halves that close have for what they have. TandemError if it fails."""


class Assignments:
    """The wanted state of all workers. `run` keeps the real one at it."""

    def __init__(self, registry: Registry, sharing: Sharing, roles: Mapping[str, Role], tell: Tell) -> None:
        """`roles`: of each worker, as it starts."""
        self.sharing = sharing
        """How the workers share the work now."""
        self._registry = registry
        self._tell = tell
        self._wanted = {worker_id: sharing.assignment(role) for worker_id, role in roles.items()}
        self._away: dict[str, Role] = {}
        """Who does not serve and is not counted by `sharing`, with the part that it plays when it does."""
        self._grace_s = 0.0
        self._told: dict[PeerRef, Assignment] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()
        registry.set_mode(sharing.mode)

    def inherit(self, sharing: Sharing, roles: Mapping[str, Role], away: Collection[str] = ()) -> None:
        """Begin anew with workers that have these roles now, or start with them; who has one that is needed keeps it.
        Those who are `away` do not serve until they are back.
        """
        assignments = assign(sharing, roles)
        self._wanted, self._told = assignments, {}
        self._away = {worker_id: assignments[worker_id].role for worker_id in away}
        for part in self._away.values():
            sharing = _counting(sharing, part, -1)
        self.sharing = sharing
        here = self._here()
        if not all(_played(half, here.values()) for half in (Role.PREFILL, Role.DECODE)):
            self._wanted.update({each: replace(assignment, role=Role.BOTH) for each, assignment in here.items()})
        self._registry.set_mode(sharing.mode)
        self._look()

    def wanted(self, worker_id: str) -> Assignment:
        """What this worker is to do, whether it runs or not: it starts with that."""
        return self._wanted[worker_id]

    async def parts(self) -> dict[str, Role]:
        """Every worker's own part, also of those that are away or stand in for others."""
        async with self._one_at_a_time:
            return {each: self._part(each) for each in self._wanted}

    def expect(self, worker_id: str, role: Role) -> None:
        """A new worker will serve some day; then `is_back`."""
        self._wanted[worker_id] = self.sharing.assignment(role)
        self._away[worker_id] = role

    def forget(self, worker_id: str) -> None:
        """A worker that is away never serves again."""
        self._wanted.pop(worker_id, None)
        self._away.pop(worker_id, None)

    async def run(self) -> None:
        """Tell workers whatever they have to be told, until cancelled."""
        try:
            async for _ in self._registry.watch():
                self._look()
        finally:
            for task in self._telling:
                task.cancel()
            self._told = {}

    async def set_mode(self, change: ModeChange) -> None:
        """Returns when every serving worker does what the new mode wants of it.

        InvalidArgument for what cannot be; DeadlineExceeded if workers do not follow: before they have opened what is
        needed nothing changes, afterwards they follow when they can.
        """
        async with self._one_at_a_time:
            await self._share(change.over(self.sharing, len(self._here())), change.grace_s)
        await self._settle(change.grace_s)

    async def flip(self, into_prefill: int, grace_s: float) -> None:
        """So many that decode prefill instead, below 0 the other way; nothing in other modes than disaggregated.

        FailedPrecondition if nobody would be left; else as `set_mode`.
        """
        async with self._one_at_a_time:
            if self.sharing.mode is not Mode.DISAGGREGATED or not into_prefill:
                return
            prefill, here = self.sharing.prefill + into_prefill, len(self._here())
            if not 1 <= prefill < here:
                raise FailedPrecondition(f"{here} workers serve, of which {prefill} cannot prefill; try again later")
            await self._share(replace(self.sharing, prefill=prefill), grace_s)
        await self._settle(grace_s)

    async def _share(self, sharing: Sharing, grace_s: float) -> None:
        """Let all who are here share the work so, and the others once they are back; halves may still close then."""
        before = self._here()
        assignments = assign(sharing, {worker_id: assignment.role for worker_id, assignment in before.items()})
        self._grace_s = grace_s
        await self._open(before, assignments)
        self.sharing = sharing
        self._registry.set_mode(sharing.mode)
        for worker_id, part in self._away.items():
            self._away[worker_id] = _at_home(sharing, part)
            self._wanted[worker_id] = sharing.assignment(self._away[worker_id])
        self._want(assignments)

    async def stand_in_for(self, worker_id: str) -> None:
        """This worker is about to leave: whoever is there opens the halves that nobody else would have open."""
        async with self._one_at_a_time:
            if worker_id in self._away:
                return
            sharing, part = self.sharing, self._part(worker_id)
            self._away[worker_id] = part
            self.sharing = _counting(sharing, part, -1)
            before = self._here()
            missing = [half for half in (Role.PREFILL, Role.DECODE) if not _played(half, before.values())]
            if missing and before:
                try:
                    await self._open(
                        before, {each: replace(assignment, role=Role.BOTH) for each, assignment in before.items()}
                    )
                except DeadlineExceeded:
                    del self._away[worker_id]
                    self.sharing = sharing
                    raise

    async def is_back(self, worker_id: str) -> None:
        """It serves, again or for the first time: stand-ins do what they did before."""
        async with self._one_at_a_time:
            part = self._away.pop(worker_id, None)
            if part is None:
                return
            self.sharing = _counting(self.sharing, part, 1)
            here = {each: assignment.role for each, assignment in self._here().items()}
            if not (self.sharing.mode is Mode.DISAGGREGATED and 1 <= self.sharing.prefill < len(here)):
                return
            self._want(assign(self.sharing, here))
        await self._settle(self._grace_s)

    def _here(self) -> dict[str, Assignment]:
        """What those do who are not away."""
        return {each: assignment for each, assignment in self._wanted.items() if each not in self._away}

    def _part(self, worker_id: str) -> Role:
        """Of its own, where stand-ins play both: they are there because nobody else plays the other."""
        role = self._away.get(worker_id, self._wanted[worker_id].role)
        if role is not Role.BOTH or self.sharing.mode is not Mode.DISAGGREGATED:
            return role
        return Role.PREFILL if self.sharing.prefill else Role.DECODE

    async def _open(self, before: Mapping[str, Assignment], assignments: Mapping[str, Assignment]) -> None:
        """Both what workers do and what they are going to do."""
        self._want(
            {
                each: replace(assignment, role=assignment.role | before[each].role)
                for each, assignment in assignments.items()
            }
        )
        late = await self._late(lambda info: not _opened(info, self._wanted[info.peer.worker_id]), OPEN_S)
        if late:
            self._want(before)
            raise DeadlineExceeded(f"{late} did not open what the new mode needs; nothing has changed, try again")

    async def _settle(self, grace_s: float) -> None:
        """Wait until everybody does what is wanted of him, whoever wanted it last."""
        late = await self._late(lambda info: not _settled(info, self._wanted), grace_s + SETTLE_S)
        if late:
            raise DeadlineExceeded(f"the mode has changed; {late} still finishes what it had, and follows then")

    def _want(self, assignments: Mapping[str, Assignment]) -> None:
        self._wanted.update(assignments)
        self._look()

    def _look(self) -> None:
        """Tell those who register with another assignment than is wanted of them."""
        members = self._registry.membership().workers
        self._told = {info.peer: told for info in members if (told := self._told.get(info.peer)) is not None}
        for info in members:
            assignment = self._wanted.get(info.peer.worker_id)
            if assignment is None or info.open is None or assignment == self._told.get(info.peer, info.assignment):
                continue
            self._told[info.peer] = assignment
            task = asyncio.ensure_future(self._tell_until_heard(info, assignment))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell_until_heard(self, info: WorkerInfo, assignment: Assignment) -> None:
        """Or until another is wanted, or it is gone."""
        while self._told.get(info.peer) == assignment:
            try:
                await self._tell(info, assignment, self._grace_s)
                return
            except TandemError as error:
                log.warning("%s was not told its assignment, %s: %s", info.peer.worker_id, assignment, error.message)
            except Exception:
                log.exception("%s was not told its assignment, %s", info.peer.worker_id, assignment)
            await asyncio.sleep(RETRY_S)

    async def _late(self, is_late: Callable[[WorkerInfo], bool], within_s: float) -> str:
        """Wait until nobody who serves is late; the names of those who are when the time is over, "" = none."""
        late: list[str] = []
        try:
            async with asyncio.timeout(within_s):
                async for membership in self._registry.watch():
                    late = self._who(membership, is_late)
                    if not late:
                        return ""
        except TimeoutError:
            log.warning("%s: not there after %.1f s", ", ".join(late), within_s)
        return ", ".join(late)

    def _who(self, membership: Membership, is_late: Callable[[WorkerInfo], bool]) -> list[str]:
        asked = (info for info in membership.workers if info.open is not None and info.peer.worker_id in self._wanted)
        return [info.peer.worker_id for info in asked if info.peer.worker_id not in self._away and is_late(info)]


def _counting(sharing: Sharing, part: Role, more: int) -> Sharing:
    """With so many more workers of this part."""
    if sharing.mode is not Mode.DISAGGREGATED or part is not Role.PREFILL:
        return sharing
    return replace(sharing, prefill=sharing.prefill + more)


def _at_home(sharing: Sharing, role: Role) -> Role:
    """The role of a worker that is away when it is back."""
    if sharing.prefill == 0:
        return Role.BOTH
    return Role.DECODE if role is Role.BOTH else role


def _played(half: Role, assignments: Iterable[Assignment]) -> bool:
    return any(assignment.role | half is assignment.role for assignment in assignments)


def _opened(info: WorkerInfo, assignment: Assignment) -> bool:
    """Whether it takes at least this work, in such steps."""
    return info.open is not None and info.open | assignment.role is info.open and info.assignment == assignment


def _settled(info: WorkerInfo, assignments: Mapping[str, Assignment]) -> bool:
    assignment = assignments.get(info.peer.worker_id)
    return assignment is None or (
        info.assignment == assignment and info.closing is None and info.role is assignment.role
    )
