"""The tiers of a worker's prefix cache: which pages of a request are loaded before it is queued, and for how long."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import chunk_pairs
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.engine.cache.tiers.cache_tiers import CacheTiers, Reload
from tandem.engine.cache.tiers.disk import DiskTier, model_folder
from tandem.engine.cache.tiers.host import HostTier
from tandem.engine.cache.tiers.tier import Tier
from tandem.engine.weights.checkpoint import weight_file_facts
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import PeerRef, PrefillTask, Reservation
from tandem.worker.config import WorkerConfig
from tandem.worker.loaded_engine import LoadedEngine

log = logging.getLogger(__name__)


def make_tiers(config: WorkerConfig, cache: PrefixCache, engine: LoadedEngine) -> CacheTiers | None:
    """Return the tiers of these settings, not started; None if the settings have no tiers.

    Raises InvalidArgument if a setting cannot be met on this host.
    """
    if not config.kv_host_bytes and not config.kv_disk_bytes:
        return None
    if config.engine.ranks > 1:
        name = "kv_host_bytes" if config.kv_host_bytes else "kv_disk_bytes"
        raise InvalidArgument(name, f"is for workers of one rank, and this one has {config.engine.ranks}; leave it out")
    copies = engine.page_copies()
    tiers: list[Tier[Any]] = []
    if config.kv_disk_bytes:
        assert config.kv_disk_path is not None
        # The files outlive the process, and with them weights that were changed in place.
        weights = weight_file_facts(config.engine.served.model)
        facts = (*engine.compatibility_facts(), ("quantization", str(config.engine.quantization)), *weights)
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
        if work.scores_prompt or self._tiers.stalled or not self._computes(work):
            return
        # One after another, so that each knows what those before it load.
        async with self._choosing:
            # On a thread, because a long prompt has thousands of pages to look up.
            chosen, saved_s = await asyncio.to_thread(self._choose, work, self._cost())
            if chosen is None:
                return
            within_s = min(self._most_s, saved_s + self._tiers.predicted_s(chosen))
            chosen.done.add_done_callback(lambda _: self._wake())
            self._tiers.begin(chosen, within_s)
        # Not `wait_for`, which would cancel the future of the tiers' thread.
        await asyncio.wait([asyncio.wrap_future(chosen.done)], timeout=within_s)

    def _computes(self, work: Reservation | PrefillTask) -> bool:
        """Return True if this worker computes the prompt, and this is the first of its messages to this worker."""
        if isinstance(work, Reservation):
            return work.prefill == self._me
        # The pages of a local prompt were loaded before they were reserved.
        return work.destination is None or work.destination.peer != self._me

    def _choose(self, work: Reservation | PrefillTask, cost: StepCost) -> tuple[Reload | None, float]:
        """Return the reload that saves most time, and the seconds that it saves; None if none saves any."""
        prefix = self._cache.prefix(work.prompt_token_ids, work.cache_salt, tenant=work.tenant)
        context = self._cache.hit(prefix) * self._cache.page_tokens
        best: tuple[Reload | None, float] = None, 0.0
        count = len(self._tiers.tiers)
        while count and (reload := self._tiers.plan(prefix, count)) is not None:
            tokens = reload.end * self._cache.page_tokens - context
            saved_s = saved_seconds(cost, context, tokens, self._chunk, self._tiers.predicted_s(reload))
            if saved_s > best[1]:
                best = reload, saved_s
            # A slow tier may cost more than it saves while the tiers before it pay.
            count = max((place for place, size in enumerate(reload.sizes.values()) if size), default=0)
        return best


def saved_seconds(cost: StepCost, context: int, tokens: int, chunk: int, reload_s: float) -> float:
    """Return the seconds that a request saves if the KV of `tokens` prompt tokens is loaded; negative if it loses.

    The tokens follow `context` tokens whose KV is there. Without the reload, they would be computed in chunks of up to
    `chunk` tokens; the reload is predicted to take `reload_s` seconds.

        saved = prefill seconds of the tokens - reload_s
    """
    return cost.prefill_seconds(tokens, chunk_pairs(tokens, context), chunk)[0] - reload_s
