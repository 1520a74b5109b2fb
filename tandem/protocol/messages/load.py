"""A worker's load report, sent after each step, and its inspection."""

from dataclasses import dataclass

from tandem.protocol.cost_parameters import UNMEASURED, CostParameters
from tandem.protocol.messages.references import PeerRef


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's load after a step; all fields except `cost` and `decode_speedup` are counts."""

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
    """Number of requests preempted since the worker started."""
    decode_speedup: float = 1.0
    """Tokens per second of recent decode steps ÷ those that steps without drafts would have given."""


@dataclass(frozen=True, slots=True)
class WorkerInspection:
    """A worker's page counts by state, its open requests, and the result of `check_integrity()` ("" = no error)."""

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
    """Hashes of the adapters that the worker's requests use, from their page reservation on."""
