"""The metrics of a worker: counts of steps and hand-overs, and values that are read at each scrape.

The engine thread reports each step after it has ended, which costs a few additions. Everything else runs on the event
loop. Any thread may read the numbers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from prefill_worker.page_writes import WritingTime
from tandem.cost_model.roofline import Roofline
from tandem.cost_model.step_collectives import StepCollectives
from tandem.cost_model.step_work import StepWork
from tandem.engine.speculation.proposer import DRAFT_SOURCES, DraftSource
from tandem.engine.steps.draft_groups import DRAFTS_MAX
from tandem.metrics import families as f
from tandem.metrics.family import Family
from tandem.metrics.registry import Facts, Reading, Registry
from tandem.protocol.cost_parameters import SECONDS, CostParameters
from tandem.protocol.lifecycle.events import TransferStats
from tandem.protocol.messages import FinishReason, RoutedEvent, WorkerInspection
from tandem.settings.ceilings import Ceilings

if TYPE_CHECKING:
    from decode_worker.speculation import SpeculationCounts
    from kv_transfer.base import Transport
    from tandem.engine.cache.tiers.cache_tiers import CacheTiers
    from tandem.engine.cache.tiers.tier import TierCounts
    from tandem.engine.energy import EnergyCounter
    from tandem.engine.model_runner import ModelRunner
    from tandem.worker.reporting.report import WorkerReport

_WINDOW_MARKS, _MARK_S = 20, 0.5
"""Utilization is averaged over this number of intervals with about `_MARK_S` seconds of steps each, 10 s in total."""
_NANOS = 1e9
_TIER_FAMILIES = (f.TIER_PAGES, f.TIER_BYTES, f.TIER_SECONDS, f.TIER_FAILURES, f.TIER_USED, f.TIER_CAPACITY)

Emit = Callable[[RoutedEvent], None]


class Utilization:
    """The fractions of the device's memory bandwidth and peak operations per second that the newest steps used.

    Bandwidth and peak (the ceilings) are measured or set by an operator. A measured ceiling that steps exceed was
    measured under load, so it is raised to the rate that the steps reached. Owned by the worker's metrics; updated on
    the engine thread.
    """

    def __init__(self, roofline: Roofline, given: Ceilings | None = None, ranks: int = 1) -> None:
        """Create counters for the steps of one rank, of the `ranks` ranks of this worker that share the device.

        `given` replaces the measured ceilings of the device.
        """
        self._roofline = roofline
        self._given = given is not None
        self.ceilings = (given or roofline.ceilings).shared(ranks)
        self.busy_s = self.bytes = self.flops = 0.0
        """Duration in seconds, bytes read and floating-point operations, summed over all steps."""
        self._marks: deque[tuple[float, float, float]] = deque([(0.0, 0.0, 0.0)], maxlen=_WINDOW_MARKS)

    def step(self, work: StepWork, seconds: float) -> None:
        """Add a step that has ended."""
        self.busy_s += seconds
        self.bytes += self._roofline.sizes.step_bytes(work)
        self.flops += self._roofline.step_flops(work)
        if self.busy_s - self._marks[-1][0] >= _MARK_S:
            self._mark()

    @property
    def bandwidth(self) -> float:
        """The used fraction of the device's memory bandwidth; 0 before the first step."""
        busy_s, read, _ = self._lately()
        return read / (busy_s * self.ceilings.bytes_per_s) if busy_s else 0.0

    @property
    def compute(self) -> float:
        """The used fraction of the device's peak operations per second; 0 before the first step."""
        busy_s, _, done = self._lately()
        return done / (busy_s * self.ceilings.flops) if busy_s else 0.0

    def _mark(self) -> None:
        busy_s, read, done = self._marks[-1]
        self._marks.append((self.busy_s, self.bytes, self.flops))
        if not self._given:
            seconds, now = self.busy_s - busy_s, self.ceilings
            flops, bandwidth = (self.flops - done) / seconds, (self.bytes - read) / seconds
            self.ceilings = Ceilings(max(now.flops, flops), max(now.bytes_per_s, bandwidth), now.launch_s)

    def _lately(self) -> tuple[float, float, float]:
        busy_s, read, done = self._marks[0]
        return self.busy_s - busy_s, self.bytes - read, self.flops - done


class WorkerMetrics:
    """The metrics of one worker. Owns the worker's registry."""

    def __init__(self, model: str, worker: str, utilization: Utilization) -> None:
        self.registry = registry = Registry({"model": model, "worker": worker})
        self.utilization = utilization
        self.writing = WritingTime()
        """The total time in which hand-overs had writes in progress."""
        self._decode_steps = registry.histogram(f.STEP_SECONDS, "decode")
        self._prefill_steps = registry.histogram(f.STEP_SECONDS, "prefill")
        self._mixed_steps = registry.histogram(f.STEP_SECONDS, "mixed")
        self._decode_over = registry.histogram(f.STEP_OVER_PREDICTED, "decode")
        self._prefill_over = registry.histogram(f.STEP_OVER_PREDICTED, "prefill")
        self._mixed_over = registry.histogram(f.STEP_OVER_PREDICTED, "mixed")
        self._rows = registry.histogram(f.STEP_DECODE_ROWS)
        self._prompts = registry.histogram(f.STEP_PREFILL_TOKENS)
        self._decode_tokens = registry.counter(f.STEP_TOKENS, "decode")
        self._prefill_tokens = registry.counter(f.STEP_TOKENS, "prefill")
        self._transfers = registry.histogram(f.TRANSFER_SECONDS)
        self._bandwidth = registry.histogram(f.TRANSFER_BANDWIDTH)
        self._transferred = registry.counter(f.TRANSFER_BYTES)
        self._failures = registry.counter(f.TRANSFER_FAILURES)
        self._refusals = registry.counter(f.KV_REFUSALS)
        registry.read(self._engine_facts)
        registry.read(lambda: {f.TRANSFER_WRITING: self.writing.seconds})

    def step(self, work: StepWork, seconds: float, predicted_s: float) -> None:
        """Count a step that has ended. Called on the engine thread."""
        rows, tokens = work.decode_rows, work.prefill_tokens
        if not tokens:
            times, over = self._decode_steps, self._decode_over
        elif rows:
            times, over = self._mixed_steps, self._mixed_over
        else:
            times, over = self._prefill_steps, self._prefill_over
        times.observe(seconds)
        if predicted_s > 0.0:
            over.observe(seconds / predicted_s)
        if rows:
            self._rows.observe(rows - work.draft_rows)
            self._decode_tokens.value += rows
        if tokens:
            self._prompts.observe(tokens)
            self._prefill_tokens.value += tokens
        self.utilization.step(work, seconds)

    def refused(self) -> None:
        """Count a reservation that was refused for lack of pages."""
        self._refusals.add()

    def hearing(self, emit: Emit) -> Emit:
        """Return a function that calls `emit` and also counts the results of hand-overs."""

        def record(routed: RoutedEvent) -> None:
            event = routed.event
            if event.transfer is not None:
                self._transfer(event.transfer)
            elif event.finish_reason is FinishReason.ERROR:
                self._failures.add()
            emit(routed)

        return record

    def collective_seconds(self, collectives: StepCollectives) -> float:
        """Return the predicted time in seconds of the collective operations of all steps."""
        cost = collectives.added_to(CostParameters(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
        prompts = self._prefill_steps.count + self._mixed_steps.count
        rows, tokens = self._decode_tokens.value, self._prefill_tokens.value
        steps_s = (self._decode_steps.count + prompts) * cost.base_s + prompts * cost.prompt_base_s
        return steps_s + rows * cost.row_s + tokens * cost.token_s

    def _engine_facts(self) -> Facts:
        used = self.utilization
        return {
            f.STEP_BUSY: used.busy_s,
            f.STEP_BYTES: used.bytes,
            f.STEP_FLOPS: used.flops,
            f.BANDWIDTH_UTILIZATION: used.bandwidth,
            f.FLOPS_UTILIZATION: used.compute,
            f.DEVICE_BANDWIDTH: used.ceilings.bytes_per_s,
            f.DEVICE_FLOPS: used.ceilings.flops,
        }

    def _transfer(self, stats: TransferStats) -> None:
        seconds = stats.duration_nanos / _NANOS
        self._transfers.observe(seconds)
        self._transferred.add(stats.bytes)
        if seconds > 0:
            self._bandwidth.observe(stats.bytes / seconds)


def engine_facts(engine: ModelRunner, role: Callable[[], str]) -> Facts:
    """Return the metrics of an engine; `role` is called at each scrape, because the role may change."""
    graphs = engine.graph_use
    return {
        f.WORKER_INFO: {(role(), engine.device_name, engine.facts.dtype): 1.0},
        f.MODEL_INFO: {("; ".join(engine.facts.summary),): 1.0},
        f.GRAPH_STEPS: {("hit",): graphs.hits, ("miss",): graphs.misses},
        f.GRAPH_PADDED_TOKENS: graphs.padded_tokens,
        f.EXPERT_TOKENS: engine.expert_tokens.read(),
    }


def rank_facts(metrics: WorkerMetrics, collectives: StepCollectives | None, ranks: int) -> Facts:
    """Return the metrics of a worker's ranks: their number and, on GPUs, the time of their collective operations."""
    if collectives is None:
        return {f.WORKER_RANKS: ranks}
    return {f.WORKER_RANKS: ranks, f.STEP_COLLECTIVES: metrics.collective_seconds(collectives)}


def energy_facts(counter: EnergyCounter | None) -> Facts:
    """Return the energy that a worker's GPUs have used; empty without a counter, and if it cannot be read."""
    try:
        return {} if counter is None else {f.STEP_ENERGY: counter.joules()}
    except OSError:
        return {}


def worker_facts(report: WorkerReport, transport: Transport) -> Facts:
    """Return the metrics of a worker that are read at a scrape."""
    load, inspection = report.load(), report.inspect()
    stored, removed = report.prefix_events
    return {
        f.REQUESTS_RUNNING: load.decode_requests,
        f.REQUESTS_WAITING: load.prefill_requests,
        f.KV_USAGE: report.kv_usage,
        f.KV_PAGES: _pages(inspection),
        f.BATCH_LIMIT: report.batch_limit,
        f.PREFIX_QUERIES: load.prefix_query_tokens,
        f.PREFIX_HITS: load.prefix_hit_tokens,
        f.PREFIX_EVENTS: {("stored",): stored, ("removed",): removed},
        f.PREEMPTIONS: load.preemptions,
        f.STEP_COST_ERROR: load.cost.error,
        **step_costs(load.cost),
        f.OPEN_LEASES: inspection.leases,
        f.PENDING_TRANSFER_PAGES: report.pending_transfer_pages,
        f.EXPIRED_LEASES: report.expired_leases,
        f.CHECKSUM_FAILURES: inspection.checksum_failures,
        f.FENCED: inspection.fenced,
        f.TRANSPORT: {(transport.transport_kinds(),): 1.0},
        f.TRANSPORT_WARNINGS: len(transport.warnings()),
        f.POOL_SOUND: not inspection.integrity_error,
        f.WORKER_READY: not report.not_ready,
        **speculation_facts(report.speculation, load.decode_speedup),
    }


def tier_facts(tiers: CacheTiers | None, pulls: TierCounts) -> Facts:
    """Return the metrics of the tiers of a prefix cache, if there are any, and of pulls from other workers."""
    facts: dict[Family, dict[tuple[str, ...], float]] = {family: {} for family in _TIER_FAMILIES}
    facts[f.TIER_PAGES].update({("peer", "loaded"): pulls.loaded_pages, ("peer", "corrupt"): pulls.corrupt_pages})
    facts[f.TIER_SECONDS]["peer", "loaded"] = pulls.loaded_s
    facts[f.TIER_FAILURES]["peer",] = pulls.failures
    for tier in () if tiers is None else tiers.tiers:
        name, counts, size = tier.name, tier.counts, tier.page_bytes
        stored, loaded = counts.stored_pages, counts.loaded_pages
        facts[f.TIER_PAGES].update({(name, "stored"): stored, (name, "loaded"): loaded})
        facts[f.TIER_PAGES].update({(name, "evicted"): counts.evicted_pages, (name, "corrupt"): counts.corrupt_pages})
        facts[f.TIER_BYTES].update({(name, "stored"): stored * size, (name, "loaded"): loaded * size})
        facts[f.TIER_SECONDS].update({(name, "stored"): counts.stored_s, (name, "loaded"): counts.loaded_s})
        facts[f.TIER_FAILURES][name,] = counts.failures
        facts[f.TIER_USED][name,] = len(tier) * size
        facts[f.TIER_CAPACITY][name,] = tier.capacity * size
    return facts


def speculation_facts(counts: SpeculationCounts | None, speedup: float) -> Facts:
    """Return the metrics of speculative decoding; empty if the worker does not speculate."""
    if counts is None:
        return {}
    return {
        f.DRAFTED: _by_position(counts.drafted),
        f.DRAFTS_ACCEPTED: _by_position(counts.accepted),
        f.DRAFTED_BY_SOURCE: _by_source(counts.drafted),
        f.ACCEPTED_BY_SOURCE: _by_source(counts.accepted),
        f.SPECULATION_SAVED: counts.saved_s,
        f.SPECULATION_LOST: counts.lost_s,
        f.SPECULATION_DRAFTING: counts.drafting_s,
        f.SPECULATION_MODEL_BYTES: {(kind,): size for kind, size in counts.model_bytes.items()},
        f.SPECULATION_SPEEDUP: speedup,
    }


def _by_position(counts: Counter[tuple[DraftSource, int]]) -> Reading:
    """Return the draft tokens by position. All positions are included, so no request creates a new series."""
    sums = dict.fromkeys(range(DRAFTS_MAX), 0)
    for (_, position), count in list(counts.items()):
        sums[position] += count
    return {(str(position),): total for position, total in sums.items()}


def _by_source(counts: Counter[tuple[DraftSource, int]]) -> Reading:
    """Return the draft tokens by proposer and length of the lookup's match. All sources are included."""
    sums = dict.fromkeys(DRAFT_SOURCES, 0)
    for (source, _), count in list(counts.items()):
        sums[source] += count
    return {(source.proposer.value, str(source.match)): total for source, total in sums.items()}


def step_costs(cost: CostParameters) -> Facts:
    """Return the fitted costs of steps; empty before the first step."""
    if not cost.observed:
        return {}
    parts: Reading = {(name.removesuffix("_s"),): getattr(cost, name) for name in SECONDS}
    return {f.STEP_COST: parts, f.STEP_FREE_TOKENS: cost.free_tokens, f.STEP_MIXED_NOISE: cost.mixed_step_margin}


def _pages(inspection: WorkerInspection) -> Reading:
    return {
        ("free",): inspection.pages_free,
        ("owned",): inspection.pages_owned,
        ("shared",): inspection.pages_shared,
        ("cached",): inspection.pages_cached,
        ("advertised",): inspection.pages_advertised,
        ("quarantined",): inspection.pages_quarantined,
        ("reserved",): inspection.pages_reserved,
    }
