"""Loads and unloads the adapters of a worker while it serves, and lists those that requests may name."""

import asyncio
import logging
from collections.abc import Callable, Collection
from pathlib import Path

from tandem.engine.adapters.slots import AdapterSlots
from tandem.protocol.errors import FailedPrecondition, StaleEpoch
from tandem.protocol.messages import AdapterFacts, PeerRef

log = logging.getLogger(__name__)


class WorkerAdapters:
    """Loads adapters into the engine's slots, one at a time, in worker threads.

    Used on the event loop. Owned by the worker.
    """

    def __init__(self, me: PeerRef, slots: AdapterSlots, used: Callable[[], set[str]]) -> None:
        """Create the worker's adapters; `used` returns the hashes of the adapters that this worker's requests use."""
        self._me = me
        self._slots = slots
        self._used = used
        self._one_at_a_time = asyncio.Lock()
        self.on_change: Callable[[], None] = lambda: None
        """Called after an adapter was loaded or unloaded."""

    @property
    def facts(self) -> tuple[AdapterFacts, ...]:
        """The loaded adapters."""
        return self._slots.facts

    def number(self, identity: str) -> int:
        """Return the slot number of the adapter with this hash (`AdapterSlots.number`)."""
        return self._slots.number(identity)

    async def load(self, meant: PeerRef, wanted: AdapterFacts, in_use: Collection[str] = ()) -> AdapterFacts:
        """Load an adapter and return its facts. The hash of its files must be `wanted.identity`, unless that is empty.

        `in_use` has the hashes of the adapters that requests on any worker use. Their slots are not reused, because a
        request with a reservation on another worker may send its prompt here next.

        Loading the same adapter twice has no effect. Raises ModelError or InvalidArgument if the adapter cannot be
        served, ResourceExhausted if all slots are in use, FailedPrecondition if its hash differs or the name belongs to
        another adapter, and StaleEpoch if another incarnation of the worker is meant. Loading continues even if the
        caller stops waiting.
        """
        self._check(meant)
        return await asyncio.shield(asyncio.ensure_future(self._load(wanted, in_use)))

    async def _load(self, wanted: AdapterFacts, in_use: Collection[str]) -> AdapterFacts:
        async with self._one_at_a_time:
            path = Path(wanted.path)
            folder = await asyncio.to_thread(self._slots.read, path)
            adapter = AdapterFacts(wanted.name, folder.identity, wanted.path)
            if wanted.identity not in {"", adapter.identity}:
                raise FailedPrecondition(
                    f"the adapter in {path} has the hash {adapter.identity} here and {wanted.identity} on another"
                    " worker; give all workers the same files"
                )
            for known in self.facts:
                if known == adapter:
                    return known
                if known.name == adapter.name:
                    if known.identity != adapter.identity:
                        raise FailedPrecondition(f"{adapter.name!r} is another adapter here; unload it first")
                    self._slots.unload(known.name)  # `claim` finds its slot again, and the slot gets the new folder
            number = self._slots.claim(adapter.identity, self._used().union(in_use))
            await asyncio.to_thread(self._slots.fill, number, adapter, folder)
        log.info("adapter %s is loaded from %s", adapter.name, adapter.path)
        self.on_change()
        return adapter

    def unload(self, meant: PeerRef, name: str) -> None:
        """Remove an adapter from the list, if it is there; requests that use it are completed.

        Raises StaleEpoch if another incarnation of the worker is meant.
        """
        self._check(meant)
        if self._slots.unload(name):
            log.info("adapter %s is unloaded", name)
            self.on_change()

    def _check(self, meant: PeerRef) -> None:
        if meant != self._me:
            raise StaleEpoch(f"{meant.worker_id}, incarnation {meant.incarnation}, is not here; look who serves now")
