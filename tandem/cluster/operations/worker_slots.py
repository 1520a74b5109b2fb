"""The current workers of a cluster: a slot for each, and the supervisor of its process."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from tandem.cluster.supervision.health import Health
from tandem.cluster.supervision.process_supervisor import Process, ProcessSupervisor
from tandem.cluster.supervision.roles import Slot
from tandem.protocol.messages import Role

log = logging.getLogger(__name__)


class Fleet:
    """Owns the workers' slots and process supervisors, from `add` until `remove`, `release` or `stop`.

    Used on the event loop.
    """

    def __init__(
        self,
        keep: Callable[[Slot], ProcessSupervisor],
        new_slot: Callable[[Role, Sequence[Slot]], Slot],
        release: Callable[[Slot], Awaitable[None]],
    ) -> None:
        """Create an empty fleet.

        `keep` makes the supervisor of a slot. `new_slot` makes a slot in addition to the given slots. `release` frees
        the resources of a slot that was removed; until it returns, the slot is not reused.
        """
        self._keep = keep
        self._new_slot = new_slot
        self._release = release
        self._slots: dict[str, Slot] = {}
        self._supervisors: dict[str, ProcessSupervisor] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._removals: dict[str, asyncio.Task[None]] = {}
        self.supervisors: Mapping[str, ProcessSupervisor] = MappingProxyType(self._supervisors)
        """The supervisors by worker id, in the order in which they were added."""

    def new_slots(self, roles: Iterable[Role]) -> list[Slot]:
        """Return one new slot for each role, to be passed to `add`.

        Raises FailedPrecondition if there is no capacity for all of them.
        """
        slots = list(self._slots.values())
        for role in roles:
            slots.append(self._new_slot(role, slots))
        return slots[len(self._slots) :]

    def add(self, slot: Slot, living: tuple[int, Process] | None = None, *, drained: bool = False) -> ProcessSupervisor:
        """Add a slot, and start a process for it in the background.

        `living` is a live process of the slot and its incarnation; if it is given, it is adopted instead. With
        `drained` no process is started until an operator wants the worker.
        """
        supervisor = self._keep(slot)
        if living is not None:
            supervisor.adopt(*living)
        if drained:
            supervisor.retire()
        self._slots[slot.worker_id], self._supervisors[slot.worker_id] = slot, supervisor
        self._runs[slot.worker_id] = asyncio.create_task(supervisor.run())
        return supervisor

    async def remove(self, worker_id: str) -> None:
        """End the worker's process, if any, and remove the slot. Idempotent."""
        supervisor = self._supervisors.get(worker_id)
        if supervisor is None:
            return
        supervisor.stop()
        if worker_id not in self._removals:
            self._removals[worker_id] = asyncio.create_task(self._remove(worker_id))
        await asyncio.shield(self._removals[worker_id])  # the caller may be cancelled, a removal must not

    async def _remove(self, worker_id: str) -> None:
        try:
            await self._runs[worker_id]
            await self._release(self._slots[worker_id])
        except Exception:
            log.exception("%s is removed, but its resources may not have been released", worker_id)
        finally:
            for mapping in (self._slots, self._supervisors, self._runs, self._removals):
                mapping.pop(worker_id, None)

    async def stop(self) -> None:
        """End all processes at once; return when they are gone."""
        for supervisor in self._supervisors.values():
            supervisor.stop()
        await asyncio.gather(*self._runs.values(), *self._removals.values())

    async def release(self) -> None:
        """Stop supervising all processes and remove their slots, without releasing the slots' resources.

        Processes that serve keep running; see `ProcessSupervisor.detach` for the others.
        """
        for supervisor in self._supervisors.values():
            supervisor.detach()
        await asyncio.gather(*self._runs.values(), *self._removals.values())
        for mapping in (self._slots, self._supervisors, self._runs):
            mapping.clear()

    def health(self) -> tuple[tuple[Slot, Health], ...]:
        """Return the current health of each worker."""
        return tuple(
            (self._slots[worker_id], supervisor.health()) for worker_id, supervisor in self._supervisors.items()
        )
