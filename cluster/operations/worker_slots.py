"""The workers that a cluster has now: a slot for each, and the keeper that fills it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from cluster.supervision.health import Health
from cluster.supervision.process_supervisor import Process, ProcessSupervisor
from cluster.supervision.roles import Slot
from wire.messages import Role

log = logging.getLogger(__name__)


class Fleet:
    """Owns slots and keepers, from `add` until `remove` or `stop`. Belongs to the event loop."""

    def __init__(
        self,
        keep: Callable[[Slot], ProcessSupervisor],
        new_slot: Callable[[Role, Sequence[Slot]], Slot],
        release: Callable[[Slot], Awaitable[None]],
    ) -> None:
        """`keep` makes the keeper of a slot, `new_slot` one more slot beside those that there are; `release` gives back
        what a slot held that is filled no more, and until it has, nobody else gets the slot.
        """
        self._keep = keep
        self._new_slot = new_slot
        self._release = release
        self._slots: dict[str, Slot] = {}
        self._keepers: dict[str, ProcessSupervisor] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._removals: dict[str, asyncio.Task[None]] = {}
        self.keepers: Mapping[str, ProcessSupervisor] = MappingProxyType(self._keepers)
        """By worker, in the order in which they came."""

    def new_slots(self, roles: Iterable[Role]) -> list[Slot]:
        """One for each, to be added. FailedPrecondition if there is no room for all."""
        slots = list(self._slots.values())
        for role in roles:
            slots.append(self._new_slot(role, slots))
        return slots[len(self._slots) :]

    def add(self, slot: Slot, living: tuple[int, Process] | None = None, *, away: bool = False) -> ProcessSupervisor:
        """Begin to fill one more; with a process that lives already, if there is one, by its incarnation, or, if it is
        to stay `away`, with none until it is wanted.
        """
        keeper = self._keep(slot)
        if living is not None:
            keeper.adopt(*living)
        if away:
            keeper.retire()
        self._slots[slot.worker_id], self._keepers[slot.worker_id] = slot, keeper
        self._runs[slot.worker_id] = asyncio.create_task(keeper.run())
        return keeper

    async def remove(self, worker_id: str) -> None:
        """End its process, if there is one, and forget the slot. Idempotent."""
        keeper = self._keepers.get(worker_id)
        if keeper is None:
            return
        keeper.stop()
        if worker_id not in self._removals:
            self._removals[worker_id] = asyncio.create_task(self._remove(worker_id))
        await asyncio.shield(self._removals[worker_id])  # whoever waits here may be cancelled, a removal must not

    async def _remove(self, worker_id: str) -> None:
        try:
            await self._runs[worker_id]
            await self._release(self._slots[worker_id])
        except Exception:
            log.exception("%s is taken out, but what it held may not have been given back", worker_id)
        finally:
            for mine in (self._slots, self._keepers, self._runs, self._removals):
                mine.pop(worker_id, None)

    async def stop(self) -> None:
        """End all processes at once; returns when they are gone."""
        for keeper in self._keepers.values():
            keeper.stop()
        await asyncio.gather(*self._runs.values(), *self._removals.values())

    async def let_go(self) -> None:
        """Keep nothing any more: processes that serve live on, and all hold their places; slots are forgotten."""
        for keeper in self._keepers.values():
            keeper.let_go()
        await asyncio.gather(*self._runs.values(), *self._removals.values())
        for mine in (self._slots, self._keepers, self._runs):
            mine.clear()

    def health(self) -> tuple[tuple[Slot, Health], ...]:
        """How each is doing now."""
        return tuple((self._slots[worker_id], keeper.health()) for worker_id, keeper in self._keepers.items())
