"""What an operator may ask of a running cluster: another mode, or that a worker leaves, while requests run."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from cluster.duties import Duties
from cluster.health import Phase
from cluster.keeper import Keeper
from cluster.modes import ModeChange
from cluster.registry import Registry
from wire.errors import DeadlineExceeded, FailedPrecondition, NotFound, TandemError
from wire.messages import WorkerInfo

log = logging.getLogger(__name__)

END_S = 20.0
"""How long the process of a drained worker may take to end."""
BACK_S = 180.0
"""How long a worker that is started again may take until it serves."""
LOOK_S = 0.05
NODE_LOOK_S = 1.0
"""How often to ask whether a node that leaves has left."""

Result = TypeVar("Result")


class Drains(Protocol):
    """Lets a worker drain; returns when it has nothing left."""

    async def drain(self, info: WorkerInfo, grace_s: float) -> None: ...


class Operator:
    """Once begun, what was asked for goes on even if nobody waits for the answer any more."""

    def __init__(
        self,
        registry: Registry,
        duties: Duties,
        keepers: Mapping[str, Keeper],
        workers: Drains,
        node_is_up: Callable[[str], Awaitable[bool]],
    ) -> None:
        """`keepers` of the workers, by worker; `node_is_up` says whether a node, by its address, is in the cluster."""
        self._registry = registry
        self._duties = duties
        self._keepers = keepers
        self._workers = workers
        self._node_is_up = node_is_up
        self._begun: set[asyncio.Task[Any]] = set()

    async def set_mode(self, change: ModeChange) -> tuple[WorkerInfo, ...]:
        """See `Duties.set_mode`; returns the workers as they are now."""
        await self._to_its_end(self._duties.set_mode(change))
        return self._registry.membership().workers

    async def drain_worker(
        self, worker_id: str, grace_s: float, *, restart: bool, force: bool, node_leaves: bool = False
    ) -> None:
        """Let it finish what it has, hand over the rest after `grace_s` seconds, and end. It stays away unless
        `restart`; then this returns when it serves again; or unless `node_leaves`: then it starts elsewhere once its
        node has left.

        NotFound for a name that no worker has. FailedPrecondition if it does not serve, has been drained before, or is
        the last one, unless `force`.
        """
        info = next((each for each in self._registry.membership().workers if each.peer.worker_id == worker_id), None)
        await self._to_its_end(self._drain(worker_id, grace_s, restart=restart, force=force))
        if node_leaves and not restart and info is not None:
            node = info.address.rpartition(":")[0]
            self._go_on_with(self._come_back_elsewhere(self._keepers[worker_id], node))

    async def _drain(self, worker_id: str, grace_s: float, *, restart: bool, force: bool) -> None:
        keeper = self._keepers.get(worker_id)
        if keeper is None:
            raise NotFound(f"no worker is called {worker_id!r}; there are {', '.join(self._keepers)}")
        if keeper.phase is not Phase.DRAINED:
            await self._let_go(keeper, self._serving(keeper, force=force), grace_s)
        elif not restart:
            raise FailedPrecondition(f"{worker_id} was drained before; add --restart to start it again")
        if restart:
            keeper.restart()
            try:
                await _until(keeper, Phase.SERVING, BACK_S)
            finally:
                await self._duties.is_back(worker_id)

    async def _come_back_elsewhere(self, keeper: Keeper, node: str) -> None:
        while await self._node_is_up(node):  # noqa: ASYNC110
            await asyncio.sleep(NODE_LOOK_S)
        if keeper.phase is not Phase.DRAINED:
            return  # somebody brought it back in the meantime
        log.info("%s, where %s was, has left; it starts elsewhere", node, keeper.name)
        keeper.restart()
        try:
            await _until(keeper, Phase.SERVING, BACK_S)
        except DeadlineExceeded as error:
            log.warning("%s", error.message)
        finally:
            await self._duties.is_back(keeper.name)

    def _serving(self, keeper: Keeper, *, force: bool) -> WorkerInfo:
        """The worker, if it may be drained."""
        members = {info.peer.worker_id: info for info in self._registry.membership().workers if info.open is not None}
        info = members.pop(keeper.name, None)
        if info is None or keeper.phase is not Phase.SERVING:
            raise FailedPrecondition(f"{keeper.name} is {keeper.phase} and cannot be drained; look at `tandem status`")
        if not members and not force:
            raise FailedPrecondition(
                f"{keeper.name} is the only worker that serves, requests would fail; add --force to drain it anyway"
            )
        return info

    async def _let_go(self, keeper: Keeper, info: WorkerInfo, grace_s: float) -> None:
        await self._duties.stand_in_for(keeper.name)
        keeper.retire()
        try:
            await self._workers.drain(info, grace_s)
        except TandemError as error:
            log.warning("%s did not drain: %s", keeper.name, error.message)
            keeper.end_now()
        await _until(keeper, Phase.DRAINED, END_S)

    async def _to_its_end(self, work: Coroutine[Any, Any, Result]) -> Result:
        return await asyncio.shield(self._go_on_with(work))

    def _go_on_with(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.ensure_future(work)
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        return task


async def _until(keeper: Keeper, phase: Phase, within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            while keeper.phase is not phase:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise DeadlineExceeded(f"{keeper.name} is {keeper.phase}, not {phase}, after {within_s:g} s") from None
