"""What an operator may ask of a running cluster: another mode, or that a worker leaves, while requests run."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
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

Result = TypeVar("Result")


class Drains(Protocol):
    """Lets a worker drain; returns when it has nothing left."""

    async def drain(self, info: WorkerInfo, grace_s: float) -> None: ...


class Operator:
    """Once begun, what was asked for goes on even if nobody waits for the answer any more."""

    def __init__(self, registry: Registry, duties: Duties, keepers: Mapping[str, Keeper], workers: Drains) -> None:
        """`keepers` of the workers, by worker."""
        self._registry = registry
        self._duties = duties
        self._keepers = keepers
        self._workers = workers
        self._begun: set[asyncio.Task[Any]] = set()

    async def set_mode(self, change: ModeChange) -> tuple[WorkerInfo, ...]:
        """See `Duties.set_mode`; returns the workers as they are now."""
        await self._to_its_end(self._duties.set_mode(change))
        return self._registry.membership().workers

    async def drain_worker(self, worker_id: str, grace_s: float, *, restart: bool, force: bool) -> None:
        """Let it finish what it has, hand over the rest after `grace_s` seconds, and end. It stays away unless
        `restart`; then this returns when it serves again.

        NotFound for a name that no worker has. FailedPrecondition if it does not serve, has been drained before, or is
        the last one, unless `force`.
        """
        await self._to_its_end(self._drain(worker_id, grace_s, restart=restart, force=force))

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
        task = asyncio.ensure_future(work)
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        return await asyncio.shield(task)


async def _until(keeper: Keeper, phase: Phase, within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            while keeper.phase is not phase:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise DeadlineExceeded(f"{keeper.name} is {keeper.phase}, not {phase}, after {within_s:g} s") from None
