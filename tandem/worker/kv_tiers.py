"""The tiers of a worker's prefix cache: which pages of a request are loaded before it is queued, and for how long."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from tandem.cost_model.prefix_reload import ReloadOption, best_reload, reload_seconds
from tandem.cost_model.step_cost import StepCost
from tandem.engine.cache.prefix_cache import Prefix, PrefixCache
from tandem.engine.cache.tiers.cache_tiers import CacheTiers, Reload
from tandem.engine.cache.tiers.disk import DiskTier, model_folder
from tandem.engine.cache.tiers.host import HostTier
from tandem.engine.cache.tiers.tier import Tier
from tandem.engine.weights.checkpoint import weight_file_facts
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import PeerRef, PrefillTask, PrefixPull, Reservation
from tandem.protocol.prefixes import PrefixRun
from tandem.worker.config import WorkerConfig
from tandem.worker.loaded_engine import LoadedEngine

log = logging.getLogger(__name__)


def make_tiers(config: WorkerConfig, cache: PrefixCache, engine: LoadedEngine) -> CacheTiers | None:
    """Return the tiers of these settings, not started; None if the settings have no tiers.

    Raises InvalidArgument if a setting cannot be met on this host.
    """
    if not config.kv_host_bytes and not config.kv_disk_bytes:
        return None
    if config.engine.context_parallel_size > 1:
        name = "kv_host_bytes" if config.kv_host_bytes else "kv_disk_bytes"
        raise InvalidArgument(name, "is not for workers whose ranks divide tokens; leave it out, or divide the model")
    copies = engine.page_copies()
    tiers: list[Tier[Any]] = []
    if config.kv_disk_bytes:
        assert config.kv_disk_path is not None
        # The files outlive the process, and with them weights that were changed in place.
        weights = weight_file_facts(config.engine.served.model)
        ranks = f"{config.engine.tensor_parallel_size} x {config.engine.pipeline_parallel_size}"
        facts = (
            *engine.compatibility_facts(),
            ("quantization", str(config.engine.quantization)),
            # A page has the parts of the ranks one after the other.
            ("ranks", ranks),
            *weights,
        )
        folder = model_folder(config.kv_disk_path, config.worker_id, facts, copies.page_bytes)
        tiers.append(DiskTier(folder, config.kv_disk_bytes, copies.page_bytes))
    if config.kv_host_bytes:
        tiers.insert(0, HostTier(config.kv_host_bytes, copies.page_bytes, copies.device))
    return CacheTiers(cache, copies, tiers)


class KvReloads:
    """Decides which KV pages a new request loads from tiers, and waits until they are loaded.

    A request waits before it is queued, so that others are computed meanwhile, and is then queued with the longer
    cached prefix. Used on the event loop. Owned by the worker.
    """

    def __init__(
        self,
        me: PeerRef,
        cache: PrefixCache,
        tiers: CacheTiers,
        *,
        cost: Callable[[], StepCost],
        chunk: int,
        most_s: float,
        wake: Callable[[], None],
    ) -> None:
        """Create the reloads.

        `cost` returns the newest cost model, `chunk` is the maximum number of prompt tokens of a step, and no request
        waits longer than `most_s` seconds. `wake` wakes the step loop when a reload has ended, because prompts may have
        waited for the pages that it held; any thread may call it.
        """
        self._me = me
        self._cache = cache
        self._tiers = tiers
        self._cost = cost
        self._chunk = chunk
        self._most_s = most_s
        self._wake = wake
        self._choosing = asyncio.Lock()

    async def load(self, work: Reservation | PrefillTask) -> None:
        """Load the pages of a prompt that are in tiers, if this is faster than to compute their tokens.

        A reload may take as long as computing the tokens would; the request then goes on with the pages that are there.
        The pages of a prompt that another worker computes are not loaded here: that worker sends them.
        """
        if work.scores_prompt or not self._computes(work):
            return
        begun = await self._begin(
            lambda: self._cache.prefix(work.prompt_token_ids, work.cache_salt, tenant=work.tenant)
        )
        if begun is not None:
            # Not `wait_for`, which would cancel the future of the tiers' thread.
            await asyncio.wait([asyncio.wrap_future(begun[0].done)], timeout=begun[1])

    async def read_ahead(self, run: PrefixRun) -> None:
        """Begin to load the pages of a prompt that a router will send, if this is faster than to compute their tokens.

        `run` has the digests of the prompt's full pages before its last token. Nothing waits for the reload: the
        request finds the pages that are there when it comes, or waits for the rest of them (`load`).
        """
        await self._begin(lambda: Prefix(run.parent, list(run.digests), len(run.digests)))

    async def _begin(self, prefix: Callable[[], Prefix]) -> tuple[Reload, float] | None:
        """Begin the reload that saves most time; return it with its maximum duration in seconds. None if none saves."""
        if self._tiers.stalled:
            return None
        # One after another, so that each knows what those before it load.
        async with self._choosing:
            # On a thread, because a long prompt has thousands of pages to look up.
            chosen, compute_s = await asyncio.to_thread(lambda: self._choose(prefix(), self._cost()))
            if chosen is None:
                return None
            within_s = min(self._most_s, compute_s)
            chosen.done.add_done_callback(lambda _: self._wake())
            self._tiers.begin(chosen, within_s)
            return chosen, within_s

    async def load_for(self, pull: PrefixPull) -> None:
        """Load the pages of a prefix that another worker pulls, unless they would come too late for it."""
        if self._tiers.stalled:
            return
        digests = list(pull.digests)
        prefix = Prefix(b"", digests, len(digests))
        async with self._choosing:
            reload = await asyncio.to_thread(self._tiers.plan, prefix, len(self._tiers.tiers))
            if reload is None or reload_seconds(reload.pages, self._tiers.loads) > pull.within_s:
                return
            reload.done.add_done_callback(lambda _: self._wake())
            self._tiers.begin(reload, pull.within_s)
        await asyncio.wait([asyncio.wrap_future(reload.done)], timeout=pull.within_s)

    def _computes(self, work: Reservation | PrefillTask) -> bool:
        """Return True if this worker computes the prompt, and this is the first of its messages to this worker."""
        if isinstance(work, Reservation):
            return work.prefill == self._me
        # The pages of a local prompt were loaded before they were reserved.
        return work.destination is None or work.destination.peer != self._me

    def _choose(self, prefix: Prefix, cost: StepCost) -> tuple[Reload | None, float]:
        """Return the reload that saves most time, and the seconds to compute its tokens; None if none saves any."""
        context = self._cache.hit(prefix) * self._cache.page_tokens
        reloads: list[Reload] = []
        count = len(self._tiers.tiers)
        while count and (reload := self._tiers.plan(prefix, count)) is not None:
            reloads.append(reload)
            # A slow tier may cost more than it saves while the tiers before it pay.
            count = max((place for place, pages in enumerate(reload.pages.values()) if pages), default=0)
        options = [ReloadOption(reload.end * self._cache.page_tokens - context, reload.pages) for reload in reloads]
        best = best_reload(cost, context, self._chunk, options, self._tiers.loads)
        return (None, 0.0) if best.option is None else (reloads[best.option], best.saved_s + best.reload_s)
