"""Assigns adapters to the adapter slots of an engine.

A slot is free, or has an adapter, which is listed or unloaded. After `unload`, the adapter keeps its slot, so that
requests that were accepted before can finish. The slot is given to another adapter only once no request uses the
unloaded one.
"""

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tandem.engine.adapters.folder import AdapterFolder
from tandem.protocol.errors import FailedPrecondition, NotFound, ResourceExhausted
from tandem.protocol.messages import AdapterFacts


class AdapterFiles(Protocol):
    """The interface that reads adapters from disk and writes their matrices into the slots."""

    def read(self, path: Path) -> AdapterFolder:
        """Read the description of an adapter folder.

        Raises ModelError or InvalidArgument if the engine cannot serve the adapter.
        """

    def write(self, slot: int, folder: AdapterFolder) -> None:
        """Write an adapter's matrices into a slot. Raises ModelError if they cannot be read.

        No step may use the slot.
        """


@dataclass(slots=True)
class _Slot:
    adapter: AdapterFacts | None = None
    """The adapter in the slot; None if the slot is free or an adapter is being written to it."""
    listed: bool = False
    taken: bool = False
    """True while an adapter is being written to the slot."""


class AdapterSlots:
    """The adapter slots of an engine. The adapter number of a row in a step is the number of its slot plus 1.

    Any thread may call it. Adapters are loaded one after another, each by `read`, `claim` and `fill`.
    """

    def __init__(self, count: int = 0, files: AdapterFiles | None = None) -> None:
        self._lock = threading.Lock()
        self._slots = [_Slot() for _ in range(count)]
        self._files = files
        self.on_write: Callable[[int, AdapterFolder], None] = lambda _slot, _folder: None
        """Called after an adapter was written into a slot, and before it is listed; `fill` raises its errors.

        A worker of several ranks writes the adapter into the slots of the other ranks.
        """

    @property
    def facts(self) -> tuple[AdapterFacts, ...]:
        """The listed adapters, in the order of their slots."""
        with self._lock:
            return tuple(slot.adapter for slot in self._slots if slot.adapter is not None and slot.listed)

    def number(self, identity: str) -> int:
        """Return the adapter number of the adapter with this hash, listed or unloaded; 0 for "", the base model.

        Raises NotFound if no slot has the adapter.
        """
        if not identity:
            return 0
        with self._lock:
            return self._find(identity) + 1

    def read(self, path: Path) -> AdapterFolder:
        """Read an adapter folder (`AdapterFiles.read`).

        Raises FailedPrecondition if the engine was started without adapter slots.
        """
        return self._loader.read(path)

    def claim(self, identity: str, used: Collection[str]) -> int:
        """Return a slot for an adapter: its old one, a free one, or that of an unloaded adapter without requests.

        `used` has the hashes of the adapters that requests use. If the slot of an unloaded adapter is taken over, new
        requests for that adapter are rejected from now on. Raises ResourceExhausted if there is no slot for the
        adapter.
        """
        with self._lock:
            unlisted = [number for number, slot in enumerate(self._slots) if not slot.listed and not slot.taken]
            adapters = {number: self._slots[number].adapter for number in unlisted}
            for number, adapter in adapters.items():
                if adapter is not None and adapter.identity == identity:
                    return number
            for number, adapter in sorted(adapters.items(), key=lambda entry: entry[1] is not None):
                if adapter is None or adapter.identity not in used:
                    self._slots[number] = _Slot(taken=True)
                    return number
        loaded = sum(slot.listed for slot in self._slots)
        finishing = ", ".join(repr(adapter.name) for adapter in adapters.values() if adapter is not None)
        why = f"; {finishing} still finishes requests" if finishing else "; unload one, or start with more --max-loras"
        raise ResourceExhausted(f"all {len(self._slots)} slots for adapters are in use, {loaded} of them loaded{why}")

    def fill(self, number: int, adapter: AdapterFacts, folder: AdapterFolder) -> None:
        """Write an adapter into the slot that `claim` returned, and list the adapter.

        The matrices are not written if the slot already has them. The slot is free again if writing fails.
        """
        written = False
        try:
            if self._slots[number].taken:
                self.write(number, folder)
                self.on_write(number, folder)
            written = True
        finally:
            with self._lock:
                self._slots[number] = _Slot(adapter, listed=True) if written else _Slot()

    def write(self, number: int, folder: AdapterFolder) -> None:
        """Write an adapter into a slot without listing it (`AdapterFiles.write`)."""
        self._loader.write(number, folder)

    def unload(self, name: str) -> bool:
        """Remove an adapter from the list; return True if it was listed."""
        with self._lock:
            listed = [slot for slot in self._slots if slot.listed and slot.adapter and slot.adapter.name == name]
            for slot in listed:
                slot.listed = False
            return bool(listed)

    @property
    def _loader(self) -> AdapterFiles:
        if self._files is None:
            raise FailedPrecondition(
                "this worker has no slots for adapters; start the cluster with --allow-runtime-lora-updating"
            )
        return self._files

    def _find(self, identity: str) -> int:
        for number, slot in sorted(enumerate(self._slots), key=lambda entry: not entry[1].listed):
            if slot.adapter is not None and slot.adapter.identity == identity:
                return number
        raise NotFound(f"no adapter with the hash {identity[:64]} is loaded here; it was unloaded")
