"""Pulls of prefixes: which pages of a prompt are fetched from another worker before the prompt is queued.

A pull is an alternative to computing tokens, like a reload from a tier (`tandem/worker/kv_tiers.py`). The router names
the worker that has the longest prefix; this worker decides by the measured rate of earlier pulls from it. The request
is then queued with the longer cached prefix. If the other worker dies, has evicted the pages, sends wrong bytes or is
slow, the request goes on without them and its tokens are computed.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from decode_worker.admission import DecodeAdmission
from decode_worker.pulled_prefixes import PulledPrefix
from tandem.cost_model.prefix_reload import ReloadOption, best_reload
from tandem.cost_model.step_cost import StepCost
from tandem.engine.cache.prefix_cache import Prefix, PrefixCache
from tandem.engine.cache.tiers.tier import MeasuredRate
from tandem.protocol.errors import NotFound, TandemError
from tandem.protocol.messages import Destination, PeerRef, PrefillTask, PrefixPull, PrefixSource, Reservation, TierLoad
from tandem.protocol.prefixes import KvTier
from tandem.worker.peers.peers import Peers

log = logging.getLogger(__name__)


class PrefixPulls:
    """Decides which prefixes this worker pulls from others, and waits until they have arrived.

    Used on the event loop. Owned by the worker.
    """

    def __init__(
        self,
        me: PeerRef,
        cache: PrefixCache,
        admission: DecodeAdmission,
        peers: Peers,
        *,
        cost: Callable[[], StepCost],
        chunk: int,
        most_s: float,
        wake: Callable[[], None],
        enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the pulls, of which none is made unless `enabled`.

        `cost`, `chunk`, `most_s` and `wake` are those of `KvReloads`.
        """
        self.address = ""
        """host:port of this worker's gRPC server, to which other workers connect before they send pages."""
        self._me = me
        self._cache = cache
        self._admission = admission
        self._peers = peers
        self._cost = cost
        self._chunk = chunk
        self._most_s = most_s
        self._wake = wake
        self._enabled = enabled
        self._clock = clock
        self._rates: dict[str, MeasuredRate] = {}
        """The rate of pulls from each worker, in pages instead of bytes per second."""
        self._all = MeasuredRate()
        """The rate of all pulls."""
        self._running: dict[PulledPrefix, int] = {}
        """The pulls in progress, each with its number of pages."""

    @property
    def load_report(self) -> TierLoad | None:
        """The seconds that a pulled page has taken recently, and the number of pages that are being pulled.

        None if this worker makes no pulls.
        """
        return self._load_of(self._all) if self._enabled else None

    async def load(self, work: Reservation | PrefillTask) -> None:
        """Pull the pages of a prompt that the request's source has and this worker lacks, if that saves time.

        A pull may take as long as computing the tokens would.
        """
        source = work.source
        if source is None or source.peer == self._me or work.scores_prompt or not self._enabled:
            return
        prefix, held = await asyncio.to_thread(self._look_up, work, source)
        # Concurrent requests with one prefix pull it once: the later ones find the pages in the pool.
        while earlier := next((pull for pull in self._running if _brings(pull, prefix, held)), None):
            await asyncio.wait([asyncio.wrap_future(earlier.done)])
            before, (prefix, held) = held, await asyncio.to_thread(self._look_up, work, source)
            if held == before:
                break
        if held >= len(prefix.digests):
            return
        page_tokens = self._cache.page_tokens
        context, end = held * page_tokens, len(prefix.digests) * page_tokens
        pages = len(self._cache.kv.sent(end, held))
        option = ReloadOption(end - context, {KvTier.PEER: pages})
        rate = self._rates.setdefault(source.peer.worker_id, MeasuredRate())
        chosen = best_reload(self._cost(), context, self._chunk, [option], [self._load_of(rate)])
        if chosen.option is not None:
            within_s = min(self._most_s, chosen.saved_s + chosen.reload_s)
            await self._pull(source, prefix, held, pages, within_s)

    def _load_of(self, rate: MeasuredRate) -> TierLoad:
        return TierLoad(KvTier.PEER, rate.seconds(1, self._clock()), sum(self._running.values()))

    def _look_up(self, work: Reservation | PrefillTask, source: PrefixSource) -> tuple[Prefix, int]:
        """Return the prefix that the source has, and the number of its digests that this worker could reuse.

        Called on a thread, because a long prompt has thousands of pages to hash.
        """
        prefix = self._cache.prefix(work.prompt_token_ids, work.cache_salt, tenant=work.tenant)
        prefix = prefix.part(min(prefix.readable, source.tokens // self._cache.page_tokens))
        return prefix, self._cache.hit(prefix)

    async def _pull(self, source: PrefixSource, prefix: Prefix, held: int, pages: int, within_s: float) -> None:
        """Pull the pages, and stop the pull if they have not arrived within `within_s` seconds."""
        try:
            pull = self._admission.pull(prefix, source.peer)
        except TandemError as error:
            log.info("nothing is pulled from %s: %s", source.peer.worker_id, error.message)
            return
        self._running[pull] = pages
        began = self._clock()
        try:
            arrived = await self._arrived(source, pull, held, within_s)
        finally:
            del self._running[pull]
            self._admission.stop_pull(pull)
            self._wake()
        if arrived is not None:
            now = self._clock()
            self._admission.pull_counts.loaded_s += now - began
            for rate in (self._rates[source.peer.worker_id], self._all):
                rate.add(now, arrived, now - began)

    async def _arrived(self, source: PrefixSource, pull: PulledPrefix, held: int, within_s: float) -> int | None:
        """Return the number of pages that have arrived in time; None if the source has none of them any longer."""
        request = PrefixPull(
            Destination(self._me, self.address, pull.lease), tuple(pull.prefix.digests), held, within_s
        )
        try:
            async with asyncio.timeout(within_s):
                await self._peers.send_prefix(source, request)
                return await asyncio.shield(asyncio.wrap_future(pull.done))
        except NotFound as error:
            log.info("%s", error.message)
            return None
        except TimeoutError:
            log.info("a prefix from %s takes too long; its tokens are computed", source.peer.worker_id)
        except TandemError as error:
            log.info("a prefix does not come from %s: %s", source.peer.worker_id, error.message)
        return 0


def _brings(pull: PulledPrefix, prefix: Prefix, held: int) -> bool:
    """Return True if a pull brings the page after the first `held` pages of a prefix."""
    return held < len(prefix.digests) and pull.prefix.digests[held : held + 1] == prefix.digests[held : held + 1]
