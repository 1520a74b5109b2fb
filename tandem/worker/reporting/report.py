"""The report of a worker: its load, which routers use for placement, and its state for `Inspect`."""

from collections.abc import Callable
from dataclasses import replace

from decode_worker.speculation import SpeculationCounts
from tandem.cost_model.step_cost import CostParameters
from tandem.cost_model.step_work import StepWork
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.engine.cache.tiers.cache_tiers import CacheTiers
from tandem.protocol.messages import PeerRef, WorkerInspection, WorkerLoad
from tandem.protocol.prefixes import PrefixList
from tandem.worker.assignment import WorkerAssignment
from tandem.worker.loop import StepLoop, StepMeter
from tandem.worker.phases import PhaseSchedulers
from tandem.worker.prefix_pulls import PrefixPulls
from tandem.worker.reporting.watchdog import Watchdog


def load_of(
    schedulers: PhaseSchedulers,
    cache: PrefixCache,
    decoding: StepWork,
    cost: CostParameters,
    tiers: CacheTiers | None = None,
) -> WorkerLoad:
    """Return the load of a worker, real or simulated, from its newest decode rows and its cost parameters."""
    pool, speculation = cache.pool, schedulers.decode.speculation
    return WorkerLoad(
        prefill_requests=schedulers.prefill.queue.length,
        prefill_tokens=schedulers.prefill.waiting_tokens(),
        decode_requests=schedulers.decode.running_requests(),
        pages_used=pool.total - pool.unreserved,
        pages_total=pool.total,
        prefix_query_tokens=cache.query_tokens,
        prefix_hit_tokens=cache.hit_tokens,
        decode_context_tokens=decoding.decode_context_tokens,
        cost=cost,
        preemptions=schedulers.admission.requests.preemptions,
        decode_speedup=1.0 if speculation is None else speculation.speedup,
        tiers=() if tiers is None else tiers.loads,
    )


class WorkerReport:
    """Reads the state of a worker's parts without changing it.

    Each call takes microseconds. Owned by the worker; called on the event loop.
    """

    def __init__(
        self,
        me: PeerRef,
        *,
        cache: PrefixCache,
        schedulers: PhaseSchedulers,
        loop: StepLoop,
        meter: StepMeter,
        assignment: WorkerAssignment,
        watchdog: Watchdog,
        tiers: Callable[[], CacheTiers | None],
        pulls: PrefixPulls,
    ) -> None:
        """`tiers` returns the tiers of the prefix cache, which may be opened later; None without tiers."""
        self._me = me
        self._cache = cache
        self._schedulers = schedulers
        self._loop = loop
        self._meter = meter
        self._assignment = assignment
        self._watchdog = watchdog
        self._tiers = tiers
        self._pulls = pulls

    def load(self) -> WorkerLoad:
        """Return the current load."""
        meter, tiers = self._meter, self._tiers()
        load = load_of(self._schedulers, self._cache, self._loop.decoding, meter.parameters, tiers)
        return replace(load, pulls=self._pulls.load_report)

    @property
    def kv_usage(self) -> float:
        """The share of the KV pages in use or reserved (`PhaseSchedulers.kv_usage`)."""
        return self._schedulers.kv_usage

    @property
    def not_ready(self) -> str:
        """The reason why the worker accepts no requests at present; empty if it accepts them."""
        return self._schedulers.not_ready

    @property
    def batch_limit(self) -> int:
        """The maximum number of requests in a decode step, in the current role."""
        return self._schedulers.batch_limit(self._assignment.role)

    @property
    def expired_leases(self) -> int:
        """The number of leases that ended because no heartbeat renewed them."""
        return self._schedulers.admission.expired_leases

    @property
    def pending_transfer_pages(self) -> int:
        """The number of KV pages of ended prompts that writes in flight still read."""
        return self._schedulers.prefill.pending_transfer_pages()

    @property
    def prefix_events(self) -> tuple[int, int]:
        """The numbers of pages ever added to the prefix cache and ever removed from it."""
        return self._cache.events

    @property
    def speculation(self) -> SpeculationCounts | None:
        """The counts of draft tokens since the worker started; None without speculative decoding."""
        speculation = self._schedulers.decode.speculation
        return None if speculation is None else speculation.counts

    def known_prefixes(self) -> PrefixList:
        """Return the digests of all cached pages that can be reused."""
        return self._cache.known()

    def inspect(self) -> WorkerInspection:
        """Return counts of pages, requests and leases, and the error that a check of the page pool has found."""
        counts, admission = self._cache.pool.counts(), self._schedulers.admission
        return WorkerInspection(
            peer=self._me,
            pages_total=counts.total,
            pages_free=counts.free,
            pages_owned=counts.owned,
            pages_shared=counts.shared,
            pages_advertised=counts.advertised,
            pages_quarantined=counts.quarantined,
            pages_reserved=counts.reserved,
            requests=self._schedulers.open_requests(),
            leases=admission.open_leases,
            integrity_error=self._watchdog.integrity_error,
            fenced=admission.fenced + self._schedulers.prefill.fenced,
            checksums_equal=admission.arrival.checksums_equal,
            checksum_failures=admission.arrival.checksum_failures,
            pages_cached=counts.cached,
            prefix_query_tokens=self._cache.query_tokens,
            prefix_hit_tokens=self._cache.hit_tokens,
            step_cost_error=self._meter.parameters.error,
            adapters_in_use=tuple(sorted(self._schedulers.adapters() - {""})),
        )
