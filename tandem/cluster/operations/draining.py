"""Draining one worker: others stand in for it, and it ends, without a successor, when it has no requests left."""

import logging
from typing import Protocol

from tandem.cluster.operations.assignments import Assignments
from tandem.cluster.supervision.health import Phase
from tandem.cluster.supervision.process_supervisor import ProcessSupervisor
from tandem.cluster.supervision.registry import Registry
from tandem.protocol.errors import FailedPrecondition, TandemError
from tandem.protocol.messages import WorkerInfo

log = logging.getLogger(__name__)

END_S = 20.0
"""Seconds that the process of a drained worker may take to end."""


class Drains(Protocol):
    """The call that drains a worker."""

    async def drain(self, info: WorkerInfo, grace_s: float) -> None:
        """Drains a worker; returns when it has no requests left."""


class Draining:
    """The drains in progress. Belongs to the event loop."""

    def __init__(self, registry: Registry, assignments: Assignments, workers: Drains) -> None:
        self._registry = registry
        self._assignments = assignments
        self._workers = workers
        self._running: set[ProcessSupervisor] = set()

    def __bool__(self) -> bool:
        """Returns True while any drain is in progress."""
        return bool(self._running)

    def registered(self, worker_id: str) -> WorkerInfo | None:
        """Returns the registration of the worker of this name; None = it does not serve."""
        members = self._registry.membership().workers
        return next((info for info in members if info.peer.worker_id == worker_id), None)

    def may_drain(self, keeper: ProcessSupervisor, *, force: bool) -> WorkerInfo:
        """Returns the worker. FailedPrecondition if it does not serve, or is the last one, unless `force`."""
        members = {info.peer.worker_id: info for info in self._registry.membership().workers if info.open is not None}
        info = members.pop(keeper.name, None)
        if info is None or keeper.phase is not Phase.SERVING:
            raise FailedPrecondition(f"{keeper.name} is {keeper.phase} and cannot be drained; look at `tandem status`")
        if not members and not force:
            raise FailedPrecondition(
                f"{keeper.name} is the only worker that serves, requests would fail; add --force to drain it anyway"
            )
        return info

    async def run(self, keeper: ProcessSupervisor, info: WorkerInfo, grace_s: float) -> None:
        """Drains a worker and ends it after `grace_s` seconds; returns when its process is gone."""
        self._running.add(keeper)
        try:
            await self._assignments.stand_in_for(keeper.name)
            keeper.retire()
            await self._drained(keeper, info, grace_s)
        finally:
            self._running.discard(keeper)

    async def _drained(self, keeper: ProcessSupervisor, info: WorkerInfo, grace_s: float) -> None:
        try:
            await self._workers.drain(info, grace_s)
        except TandemError as error:
            log.warning("%s did not drain: %s", keeper.name, error.message)
            keeper.end_now()
        await keeper.until(Phase.DRAINED, END_S)
