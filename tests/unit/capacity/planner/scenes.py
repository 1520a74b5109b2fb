"""Clusters and loads whose load ratios can be computed by hand."""

from dataclasses import replace

from tandem.capacity.planner.demand import LatencyTargets
from tandem.capacity.planner.load_ratio import WorkerFacts
from tandem.capacity.planner.observation import Observation, Offered, TargetCounts
from tandem.protocol.cost_parameters import CostParameters

COSTS = CostParameters(
    base_s=10e-3, prompt_base_s=0.0, token_s=1e-4, pair_s=0.0, row_s=1e-4, context_s=0.0, free_tokens=0, observed=1
)
"""Costs: a chunk of 900 tokens takes 100 ms, and 100 rows decode in 20 ms."""
FACTS = WorkerFacts(COSTS, kv_tokens=1e6, batch_requests=1000, chunk_tokens=900, longest_tokens=4096)
TARGETS = LatencyTargets(ttft_s=100.0, gap_s=20e-3)
"""Targets whose TTFT is so loose that only computing counts."""


def offered(per_s: float, prompt: float, answer: float, cached: float = 0.0) -> Offered:
    return Offered(per_s, prompt, cached, answer)


def seen(per_s: float, prompt: float, answer: float, prefill: int = 4, decode: int = 4, **more: object) -> Observation:
    """Returns a window of 10 s."""
    before = Observation(
        10.0, offered(per_s, prompt, answer), TARGETS, FACTS, FACTS, prefill, decode, kept=TargetCounts(100.0)
    )
    return replace(before, **more)  # type: ignore[arg-type]
