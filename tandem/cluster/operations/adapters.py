"""The list of LoRA adapters of a running cluster, and the loop that makes every worker load these adapters.

The list is authoritative. It is published with the membership, which routers and workers follow, so a restarted router
has the list at once. A worker that registers without an adapter of the list, because the worker has just started, must
load the adapter before it takes requests; a worker with an adapter that is not in the list unloads that adapter. A
controller that takes over starts with the list of the leader that it followed; if it followed none, with the adapters
of the config and of the live workers.

Changes are sequential. An adapter enters the list once every live worker has loaded it with the same hash; if one
worker fails, all workers unload the adapter. An adapter leaves the list before the workers unload it, and no worker
reuses its slot while a request on any worker uses the adapter.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from pathlib import PurePath
from typing import Protocol

from tandem.cluster.background import Changes
from tandem.cluster.supervision.registry import Registry
from tandem.logging.recurring import RECURRING
from tandem.protocol.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ModelError,
    NotFound,
    TandemError,
    Unavailable,
    shown,
)
from tandem.protocol.messages import AdapterFacts, PeerRef, WorkerInfo

log = logging.getLogger(__name__)

RETRY_S = 2.0
"""Seconds before a worker that failed to load or unload an adapter is sent the call again."""
REGISTER_S = 10.0
"""Timeout for workers to register with an adapter that they have loaded, in seconds."""
NAME_MAX = 256


class AdapterCalls(Protocol):
    """Adapter calls to workers. Every failure is a TandemError."""

    async def adapters_in_use(self, info: WorkerInfo) -> Collection[str]:
        """Return the hashes of the adapters that a worker's requests use.

        A request counts from the reservation of its pages.
        """

    async def load_adapter(self, info: WorkerInfo, adapter: AdapterFacts, in_use: Collection[str]) -> AdapterFacts:
        """Have a worker load an adapter and return the adapter that it loaded.

        An adapter with an empty `identity` may have any hash. The worker may not reuse the slots of the adapters whose
        hashes are `in_use`.
        """

    async def unload_adapter(self, info: WorkerInfo, name: str) -> None:
        """Have a worker unload an adapter."""


class Adapters:
    """The list of adapters, and the loop that makes each worker load exactly these.

    Used on the event loop.
    """

    def __init__(
        self,
        registry: Registry,
        calls: AdapterCalls,
        *,
        allowed: bool,
        first: Sequence[AdapterFacts] = (),
        model_names: Sequence[str] = (),
    ) -> None:
        """Create the list with the adapters `first`, whose hashes are not known yet.

        No adapter may have one of `model_names` as its name. Unless changes are `allowed`, the cluster keeps the
        adapters that its workers start with.
        """
        self._registry = registry
        self._calls = calls
        self._allowed = allowed
        self._model_names = model_names
        self._first = first
        self._wanted = {adapter.name: adapter for adapter in first}
        self._failed: dict[PeerRef, str] = {}
        """The reason why a worker could not load an adapter, by worker."""
        self._one_at_a_time = asyncio.Lock()
        self._changes = Changes("a change of the adapters")
        self._retry: asyncio.TimerHandle | None = None

    async def load(self, name: str, path: str) -> AdapterFacts:
        """Have every worker load the adapter in the folder `path`; return the adapter once requests may name it.

        Raises InvalidArgument, with the worker and the reason, if a worker cannot serve the adapter or the name is
        taken; ResourceExhausted if a worker has no free slot; FailedPrecondition if adapters may not change. A running
        change continues if the caller no longer waits.
        """
        self._check_allowed()
        self._check(name, path)
        return await self._changes.to_its_end(self._load(AdapterFacts(name, "", path)))

    async def unload(self, name: str) -> None:
        """Remove an adapter from the list and have the workers unload it. Raises NotFound if it is not listed."""
        self._check_allowed()
        await self._changes.to_its_end(self._unload(name))

    def inherit(self) -> None:
        """Initialize the list from the leader that was followed; if there was none, from config and live workers.

        A live worker's adapter replaces an adapter of the config with the same name only if both have the same folder.
        """
        followed = self._registry.membership().adapters
        self._failed.clear()
        self._wanted = {adapter.name: adapter for adapter in (self._first if followed is None else followed)}
        for info in self._members() if followed is None else ():
            for adapter in info.model.adapters:
                listed = self._wanted.get(adapter.name)
                if listed is None or (not listed.identity and listed.path == adapter.path):
                    self._wanted[adapter.name] = adapter

    async def run(self) -> None:
        """Make each worker that registers load and unload adapters to match the list, until cancelled.

        The cancellation also cancels running changes.
        """
        if not self._allowed:
            return
        self._registry.lack = self._lack
        self._publish()
        try:
            async for _ in self._registry.watch():
                async with self._one_at_a_time:
                    await self._bring_all()
        finally:
            self._registry.lack = lambda _: ""
            self._changes.cancel()

    def _check_allowed(self) -> None:
        if not self._allowed:
            raise FailedPrecondition(
                "adapters of this cluster do not change while it serves; start it with --allow-runtime-lora-updating"
            )

    def _check(self, name: str, path: str) -> None:
        if not name or len(name) > NAME_MAX or not name.isprintable():
            raise InvalidArgument("lora_name", f"{shown(name)} is not a name of 1 to {NAME_MAX} printable characters")
        if name in self._model_names:
            raise InvalidArgument("lora_name", f"{shown(name)} is the model's own name; give the adapter another one")
        if not PurePath(path).is_absolute() or "\0" in path:
            raise InvalidArgument("lora_path", f"{shown(path)} is no absolute path of a folder on the workers' hosts")

    async def _load(self, adapter: AdapterFacts) -> AdapterFacts:
        async with self._one_at_a_time:
            if adapter.name in self._wanted:
                raise InvalidArgument("lora_name", f"{shown(adapter.name)} is loaded already; unload it first")
            try:
                loaded = await self._load_everywhere(adapter)
            except BaseException:
                await self._unload_everywhere(adapter.name)
                raise
            self._wanted[loaded.name] = loaded
            self._publish()
        log.info("adapter %s is loaded from %s", loaded.name, loaded.path)
        return loaded

    async def _load_everywhere(self, adapter: AdapterFacts) -> AdapterFacts:
        """Have all live workers load the adapter; return the adapter once all workers are registered with it.

        Workers that start meanwhile count too.
        """
        while lacking := [info for info in self._members() if adapter not in info.model.adapters]:
            in_use = await self._in_use()
            loads = (self._load_at(info, adapter, in_use) for info in lacking)
            results = await asyncio.gather(*loads, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
                if adapter.identity not in {"", result.identity}:
                    raise InvalidArgument("lora_path", f"{adapter.path} has other files on another worker's host")
                adapter = result
            await self._registered({info.peer for info in lacking}, adapter)
        if not adapter.identity:
            raise Unavailable("no worker serves that could load an adapter; try again")
        return adapter

    async def _in_use(self) -> Collection[str]:
        """Return the hashes of the adapters that are used by a request on any worker.

        All workers count: a request with a reservation on one worker may still have its prefill on another.
        """
        hashes = await asyncio.gather(*(self._calls.adapters_in_use(info) for info in self._members()))
        return set[str]().union(*hashes)

    async def _load_at(self, info: WorkerInfo, adapter: AdapterFacts, in_use: Collection[str]) -> AdapterFacts:
        try:
            return await self._calls.load_adapter(info, adapter, in_use)
        except (InvalidArgument, ModelError, FailedPrecondition) as error:
            worker = f"worker {info.peer.worker_id}"
            raise InvalidArgument("lora_path", f"{worker}: {error.message.removeprefix(f'{worker}: ')}") from error

    async def _registered(self, peers: set[PeerRef], adapter: AdapterFacts) -> None:
        """Wait until each of these workers is registered with the adapter, or is gone."""
        late: list[str] = []
        try:
            async with asyncio.timeout(REGISTER_S):
                async for _ in self._registry.watch():
                    members = [info for info in self._members() if info.peer in peers]
                    late = [info.peer.worker_id for info in members if adapter not in info.model.adapters]
                    if not late:
                        return
        except TimeoutError:
            raise DeadlineExceeded(f"{', '.join(late)} did not register with the adapter; try again") from None

    async def _unload(self, name: str) -> None:
        async with self._one_at_a_time:
            if name not in self._wanted:
                loaded = ", ".join(map(repr, self._wanted)) or "none"
                raise NotFound(f"lora_name: {shown(name)} is not loaded; loaded are: {loaded}")
            # Requests can no longer name the adapter when its workers begin to unload it.
            del self._wanted[name]
            self._publish()
            await self._unload_everywhere(name)
        log.info("adapter %s is unloaded", name)

    async def _unload_everywhere(self, name: str) -> None:
        """Have every worker unload an adapter; `run` retries workers that failed."""
        unloads = (self._calls.unload_adapter(info, name) for info in self._members())
        for result in await asyncio.gather(*unloads, return_exceptions=True):
            if isinstance(result, BaseException):
                log.warning("an adapter could not be unloaded, which is tried again: %s", result)

    async def _bring_all(self) -> None:
        """Make each worker load and unload adapters until it matches the list; schedule a retry after a failure."""
        members = self._members()
        peers = {info.peer for info in members}
        self._failed = {peer: why for peer, why in self._failed.items() if peer in peers}
        # Sequential, because the first worker that loads an adapter determines the hash that the others must have.
        results = [await self._bring(info) for info in members if self._differs(info)]
        if not all(results) and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self._registry.look_again()

    def _differs(self, info: WorkerInfo) -> bool:
        return set(info.model.adapters) != set(self._wanted.values())

    async def _bring(self, info: WorkerInfo) -> bool:
        """Make one worker match the list; return False if a call to the worker failed."""
        try:
            for known in info.model.adapters:
                if known != self._wanted.get(known.name):
                    await self._calls.unload_adapter(info, known.name)
            for adapter in tuple(self._wanted.values()):
                if adapter not in info.model.adapters:
                    in_use = await self._in_use()
                    self._wanted[adapter.name] = await self._calls.load_adapter(info, adapter, in_use)
        except TandemError as error:
            self._failed[info.peer] = error.message
            log.error("worker %s: %s", info.peer.worker_id, error.message, extra=RECURRING)
            return False
        self._failed.pop(info.peer, None)
        self._publish()
        return True

    def _lack(self, info: WorkerInfo) -> str:
        """Return the adapters of the list that a worker has not loaded, with the reason; "" = none."""
        missing = [repr(adapter.name) for adapter in self._wanted.values() if adapter not in info.model.adapters]
        if not missing:
            return ""
        why = self._failed.get(info.peer)
        return (
            f"adapter {', '.join(missing)} is not loaded{'' if why is None else f' ({why}); unload it, or repair it'}"
        )

    def _members(self) -> list[WorkerInfo]:
        """Return the workers that take requests."""
        return [info for info in self._registry.membership().workers if info.open is not None]

    def _publish(self) -> None:
        self._registry.set_adapters(tuple(adapter for adapter in self._wanted.values() if adapter.identity))
