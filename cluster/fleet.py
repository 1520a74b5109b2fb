"""The workers that a cluster has now: a slot for each, and the keeper that fills it."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from cluster.health import Health
from cluster.keeper import Keeper, Process
from cluster.roles import Slot
from wire.messages import Role


class Fleet:
    """Owns slots and keepers, from `add` until `remove` or `stop`. Belongs to the event loop."""

    def __init__(
        self,
        keep: Callable[[Slot], Keeper],
        new_slot: Callable[[Role, Sequence[Slot]], Slot],
        release: Callable[[Slot], None] = lambda _: None,
    ) -> None:
        """`keep` makes the keeper of a slot, `new_slot` one more slot beside those that there are; `release` gives back
        what a slot held that is filled no more.
        """
        self._keep = keep
        self._new_slot = new_slot
        self._release = release
        self._slots: dict[str, Slot] = {}
        self._keepers: dict[str, Keeper] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self.keepers: Mapping[str, Keeper] = MappingProxyType(self._keepers)
        """By worker, in the order in which they came."""

    def new_slots(self, roles: Iterable[Role]) -> list[Slot]:
        """One for each, to be added. FailedPrecondition if there is no room for all."""
        slots = list(self._slots.values())
        for role in roles:
            slots.append(self._new_slot(role, slots))
        return slots[len(self._slots) :]

    def add(self, slot: Slot, living: tuple[int, Process] | None = None, *, away: bool = False) -> Keeper:
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
        if run := self._runs.get(worker_id):
            await asyncio.shield(run)  # whoever waits here may be cancelled, a keeper must not
        if self._keepers.get(worker_id) is keeper:
            self._runs.pop(worker_id, None)
            del self._keepers[worker_id]
            self._release(self._slots.pop(worker_id))

    async def stop(self) -> None:
        """End all processes at once; returns when they are gone."""
        for keeper in self._keepers.values():
            keeper.stop()
        await asyncio.gather(*self._runs.values())

    async def let_go(self) -> None:
        """Keep nothing any more: processes that serve live on, and all hold their places; slots are forgotten."""
        for keeper in self._keepers.values():
            keeper.let_go()
        await asyncio.gather(*self._runs.values())
        for mine in (self._slots, self._keepers, self._runs):
            mine.clear()

    def health(self) -> tuple[tuple[Slot, Health], ...]:
        """How each is doing now."""
        return tuple((self._slots[worker_id], keeper.health()) for worker_id, keeper in self._keepers.items())
