"""What a worker says of itself: its load, which routers place by, and what an inspection finds."""

from engine.cache.prefix_cache import PrefixCache
from wire.messages import PeerRef, WorkerInspection, WorkerLoad
from worker.caretaker import Caretaker
from worker.halves import Halves
from worker.loop import StepLoop
from worker.step_meter import StepMeter


class WorkerReport:
    """Looks at the parts of a worker and changes none; each answer takes microseconds."""

    def __init__(
        self, me: PeerRef, *, cache: PrefixCache, halves: Halves, loop: StepLoop, meter: StepMeter, caretaker: Caretaker
    ) -> None:
        self._me = me
        self._cache = cache
        self._halves = halves
        self._loop = loop
        self._meter = meter
        self._caretaker = caretaker

    def load(self) -> WorkerLoad:
        """Load now."""
        counts, halves = self._cache.pool.counts(), self._halves
        return WorkerLoad(
            prefill_requests=halves.prefill.waiting_requests(),
            prefill_tokens=halves.prefill.waiting_tokens(),
            decode_requests=halves.decode.running_requests(),
            pages_used=counts.total - counts.free - counts.cached + counts.promised,
            pages_total=counts.total,
            prefix_query_tokens=self._cache.query_tokens,
            prefix_hit_tokens=self._cache.hit_tokens,
            decode_context_tokens=self._loop.decoding.decode_context_tokens,
            cost=self._meter.parameters,
            preemptions=halves.admission.preemptions,
        )

    def inspect(self) -> WorkerInspection:
        """Page counts, open work, and whether the pool was sound whenever this worker was idle."""
        counts, admission = self._cache.pool.counts(), self._halves.admission
        return WorkerInspection(
            peer=self._me,
            pages_total=counts.total,
            pages_free=counts.free,
            pages_owned=counts.owned,
            pages_shared=counts.shared,
            pages_advertised=counts.advertised,
            pages_quarantined=counts.quarantined,
            pages_promised=counts.promised,
            requests=self._halves.open_requests(),
            leases=admission.open_leases,
            integrity_error=self._caretaker.integrity_error,
            fenced=admission.fenced + self._halves.prefill.fenced,
            checksums_equal=admission.arrival.checksums_equal,
            checksum_failures=admission.arrival.checksum_failures,
            pages_cached=counts.cached,
            prefix_query_tokens=self._cache.query_tokens,
            prefix_hit_tokens=self._cache.hit_tokens,
            step_cost_error=self._meter.parameters.error,
        )
