"""The load ratio: a demand ÷ the capacity of a number of workers; at 1 the latency targets can just be met.

Prefill is modelled as a pool of equal servers with one queue. 90 % of the first tokens must meet the TTFT target, so
the pool's maximum utilization is lower with fewer or slower workers (Sakasegawa, An approximation formula L_q =
αρ^β/(1-ρ), 1977, with an exponential tail). The duration of a decode step grows with its rows; their number is bounded
by the ITL target, the KV cache and the batch limit. Workers that do both divide each step between prefill and decode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from tandem.capacity.planner.demand import Demand, LatencyTargets
from tandem.cost_model.step_cost import StepCost
from tandem.protocol.cost_parameters import CostParameters
from tandem.protocol.ending import decode_pages
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import Role

BUSY_MAX = 0.95
"""Maximum utilization of a pool of prefill workers, even with a loose TTFT target."""
LATE = 0.1
"""Fraction of first tokens that may miss their target."""
LONG_PROMPT = 2.0
"""The 90th percentile of prompt lengths ÷ their mean, for lognormal lengths with a sigma of 0.8."""
SLACK_MIN = 0.1
"""Minimum fraction of the TTFT target that is assumed to be left for queueing after the computation."""
HEADROOM = 0.9
"""Maximum average number of decode rows of a worker ÷ the rows that fit: below 1, because arrivals are uneven."""
_HALVINGS = 30


class Limit(StrEnum):
    """The resource or latency target that limits the throughput of a split."""

    TTFT = "time to first token"
    COMPUTE = "prefill compute"
    GAP = "time between tokens"
    KV = "KV capacity"
    BATCH = "batch limit"


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Workers of one kind: the cost of their steps, and the capacity of each."""

    cost: CostParameters
    kv_tokens: float
    """Number of tokens whose KV fits into the whole page pool."""
    batch_requests: int
    """Maximum number of requests in a decode batch."""
    chunk_tokens: int
    """Maximum number of prompt tokens in a step."""
    longest_tokens: int
    """Maximum length of a prompt in tokens; workers with both roles keep enough pages free for one such prompt.

    See `tandem.protocol.ending.decode_pages`.
    """
    kv: KvPages | None = None
    """The page geometry of a model with sliding windows, else None.

    With sliding windows, `kv_tokens` counts the pages of each layer group separately.
    """
    decode_speedup: float = 1.0
    """Tokens per second of recent decode steps ÷ those of steps without draft tokens (`WorkerLoad`).

    Load ratios ignore the speedup, because draft tokens may not raise the throughput of a full batch.
    """
    replicas: float = 1
    """Number of a worker's parts that compute different requests; costs and capacity are those of each part."""

    def occupied(self, tokens: float, role: Role) -> float:
        """Return the part of `kv_tokens` that a request of `tokens` tokens occupies."""
        if self.kv is None:
            return tokens
        return self.kv.held(math.ceil(tokens), decoding=not role.prefills) * self.kv.page_tokens


@dataclass(frozen=True, slots=True)
class LoadRatio:
    """The load ratio of one role: 0 = idle, 1 = at the limit, above 1 = targets are missed."""

    value: float
    limit: Limit

    @property
    def text(self) -> str:
        """The load ratio as text."""
        return f"{self.value:.0%} ({self.limit})"


def prefill_load_ratio(
    demand: Demand, targets: LatencyTargets, facts: WorkerFacts, workers: int, backlog_s: float = 0.0
) -> LoadRatio:
    """Return the load ratio of `workers` prefill workers.

    `backlog_s` is the work on queued prompts in addition to the new load, in device seconds per second.
    """
    servers = workers * facts.replicas
    each_s = demand.prompt_seconds(StepCost(facts.cost), facts.chunk_tokens)
    busy = (demand.per_s * each_s + backlog_s) / servers
    cap = busy_cap(servers, each_s, targets.ttft_s)
    return LoadRatio(busy / cap, Limit.COMPUTE if cap >= BUSY_MAX else Limit.TTFT)


def busy_cap(workers: float, service_s: float, ttft_s: float) -> float:
    """Return the utilization of `workers` prefill workers at which the fraction `LATE` of the prompts misses the TTFT.

    A mean prompt takes `service_s` seconds on a worker; the TTFT target is `ttft_s` seconds. The result is at most
    `BUSY_MAX` and at least `SLACK_MIN`.
    """
    if service_s <= 0 or ttft_s == math.inf:
        return BUSY_MAX
    slack = max(ttft_s - LONG_PROMPT * service_s, SLACK_MIN * ttft_s) / service_s
    low, high = 0.0, BUSY_MAX
    for _ in range(_HALVINGS):
        busy = (low + high) / 2
        # The probability to queue (Sakasegawa) times the exponential tail of the queueing time beyond the slack.
        late = busy ** (math.sqrt(2 * (workers + 1)) - 1) * math.exp(-workers * (1 - busy) * slack)
        low, high = (busy, high) if late <= LATE else (low, busy)
    return max(high, SLACK_MIN)


@dataclass(frozen=True, slots=True)
class Rows:
    """The mean number of requests that a worker may decode at once, at least 1, and the limit that determines it."""

    count: float
    limit: Limit


def rows_that_fit(demand: Demand, targets: LatencyTargets, facts: WorkerFacts, role: Role = Role.DECODE) -> Rows:
    """Return the mean number of decode rows that fit on a worker of this role: within ITL, KV pool and batch limit."""
    pages = decode_pages(role, int(facts.kv_tokens), int(facts.occupied(facts.longest_tokens, role)))
    kv_tokens = facts.kv_tokens if pages is None else pages
    by_gap = StepCost(facts.cost).rows_within(targets.gap_s, demand.context_tokens)
    strictest = min(
        (HEADROOM * by_gap, Limit.GAP),
        (HEADROOM * kv_tokens / max(facts.occupied(demand.kv_tokens, role), 1.0), Limit.KV),
        (HEADROOM * facts.batch_requests, Limit.BATCH),
        key=lambda bound: bound[0],
    )
    return Rows(max(strictest[0], 1.0), strictest[1])


def decode_load_ratio(demand: Demand, targets: LatencyTargets, facts: WorkerFacts, workers: int) -> LoadRatio:
    """Return the load ratio of `workers` decode workers."""
    fits = rows_that_fit(demand, targets, facts)
    step_s = StepCost(facts.cost).rows_seconds(fits.count, fits.count * demand.context_tokens)
    per_s = demand.per_s * demand.answer_tokens / (workers * facts.replicas)
    return LoadRatio(per_s * step_s / fits.count, fits.limit)


def shared_load_ratio(
    demand: Demand, targets: LatencyTargets, facts: WorkerFacts, workers: int, backlog_s: float = 0.0
) -> LoadRatio:
    """Return the load ratio of `workers` workers that do both prefill and decode.

    The load determines the share of a worker's time that prompts take and the share that decode rows take. The rest of
    each step is its base cost, so a step lasts base ÷ (1 - share of prefill - share of decode) seconds. At the maximum
    load this duration reaches the ITL target, or all rows that fit are used, or the TTFT target is just met.

    `backlog_s` is the work on queued prompts in addition to the new load, in device seconds per second.
    """
    cost, base_s = StepCost(facts.cost), facts.cost.base_s
    servers = workers * facts.replicas
    per_s = demand.per_s / servers
    prompts_s = per_s * demand.prompt_seconds(cost, facts.chunk_tokens) + backlog_s / servers
    answers_s = per_s * demand.answer_tokens * cost.row_seconds(demand.context_tokens)
    fits = rows_that_fit(demand, targets, facts, Role.BOTH)
    # The number of rows is tokens per second times step time, so the step may also last until all rows that fit are
    # used.
    by_rows_s = fits.count / max(per_s * demand.answer_tokens, 1e-9)
    longest_s = min(targets.gap_s * HEADROOM, max(by_rows_s, base_s))
    headroom = max(1.0 - base_s / longest_s, SLACK_MIN) if longest_s < math.inf else 1.0
    cap = min(headroom, busy_cap(servers, prompts_s / max(per_s, 1e-9), targets.ttft_s))
    by_gap = targets.gap_s * HEADROOM <= by_rows_s
    limit = fits.limit if not by_gap else Limit.GAP if headroom <= cap else Limit.TTFT
    return LoadRatio((prompts_s + answers_s) / cap, limit)
