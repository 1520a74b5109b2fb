"""The load report that a worker sends after each step, and the result of inspecting a worker."""

from dataclasses import dataclass

from tandem.protocol.cost_parameters import UNMEASURED, CostParameters
from tandem.protocol.messages.references import PeerRef
from tandem.protocol.prefixes import KvTier


@dataclass(frozen=True, slots=True)
class TierLoad:
    """The speed of a tier of the prefix cache, and the depth of its queue."""

    tier: KvTier
    page_s: float = 0.0
    """Measured seconds to load a page.

    0 without a recent measurement, so that a first reload makes one; infinite if all recent loads have failed.
    """
    queued_pages: int = 0
    """Number of pages to be loaded by reloads that have begun or wait."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of a worker after a step; the fields up to `decode_context_tokens` are counts."""

    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    pages_used: int
    pages_total: int
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    decode_context_tokens: int = 0
    cost: CostParameters = UNMEASURED
    preemptions: int = 0
    """Number of preemptions since the worker started."""
    decode_speedup: float = 1.0
    """Tokens per second of recent decode steps ÷ those that steps without draft tokens would have given."""
    tiers: tuple[TierLoad, ...] = ()
    """The tiers of the prefix cache, the fastest first."""
    pulls: TierLoad | None = None
    """The pulls of pages from other workers; None if the worker pulls none."""


@dataclass(frozen=True, slots=True)
class WorkerInspection:
    """The result of inspecting a worker: page counts by state, open requests, and integrity error ("" = none)."""

    peer: PeerRef
    pages_total: int
    pages_free: int
    pages_owned: int
    pages_shared: int
    pages_advertised: int
    pages_quarantined: int
    pages_reserved: int
    requests: int
    leases: int
    integrity_error: str
    fenced: int
    checksums_equal: int = 0
    checksum_failures: int = 0
    pages_cached: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    step_cost_error: float = 0.0
    adapters_in_use: tuple[str, ...] = ()
    """Hashes of the adapters that the worker's requests use; a request counts as soon as its pages are reserved."""
