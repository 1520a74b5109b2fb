"""How near to its limit a number of workers is under a demand: 1 = what was promised can just be kept.

Prompts: a pool of equal servers with one queue. Nine in ten first tokens must come in time, so the pool may be busy the
less, the fewer and the slower its workers are (Sakasegawa, An approximation formula L_q = αρ^β/(1-ρ), 1977, with an
exponential tail). Answers: steps grow with the rows in them, and so many rows fit as the gap target, the KV cache and
the batch limit leave room for. Workers that do both divide each step between the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from costs.step_cost import StepCost
from planner.demand import Demand, Promise
from wire.cost_parameters import CostParameters
from wire.ending import decode_pages
from wire.messages import Role

BUSY_MAX = 0.95
"""Part of the time that a pool of prefill workers may compute, however loose the target."""
LATE = 0.1
"""Part of the first tokens that may come too late."""
LONG_PROMPT = 2.0
"""The prompt that one in ten is longer than, in mean ones: lognormal with a sigma of 0.8."""
SLACK_MIN = 0.1
"""Part of the target that counts as left for waiting where computing alone nearly takes all of it."""
HEADROOM = 0.9
"""Part of the rows that fit which a worker may have on average: arrivals are uneven."""
_HALVINGS = 30


class Limit(StrEnum):
    """What binds first."""

    TTFT = "time to first token"
    COMPUTE = "prefill compute"
    GAP = "time between tokens"
    KV = "KV capacity"
    BATCH = "batch limit"


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """A worker of a kind: what its steps cost, and how much it holds."""

    cost: CostParameters
    kv_tokens: float
    """Of its whole page pool."""
    batch_requests: int
    """Most rows of a decode step."""
    chunk_tokens: int
    """Most prompt tokens of a step."""
    longest_tokens: int
    """That a prompt may have: workers that do both keep room for one (`wire.ending.decode_pages`)."""


@dataclass(frozen=True, slots=True)
class Strain:
    """Of one kind of workers: 0 = nothing to do, 1 = at the limit, above = promises break."""

    value: float
    limit: Limit

    @property
    def text(self) -> str:
        """For a person."""
        return f"{self.value:.0%} ({self.limit})"


def prefill_strain(
    demand: Demand, promise: Promise, facts: WorkerFacts, workers: int, backlog_s: float = 0.0
) -> Strain:
    """Of `workers` that only compute prompts. `backlog_s`: device seconds of waiting prompts to be worked off in each
    second, beside what comes.
    """
    each_s = demand.prompt_seconds(StepCost(facts.cost), facts.chunk_tokens)
    busy = (demand.per_s * each_s + backlog_s) / workers
    cap = busy_cap(workers, each_s, promise.ttft_s)
    return Strain(busy / cap, Limit.COMPUTE if cap >= BUSY_MAX else Limit.TTFT)


def busy_cap(workers: int, service_s: float, ttft_s: float) -> float:
    """The part of the time that so many workers may be busy, if all but `LATE` of the prompts, each `service_s` on
    average, are to have their first token within `ttft_s`.
    """
    if service_s <= 0 or ttft_s == math.inf:
        return BUSY_MAX
    slack = max(ttft_s - LONG_PROMPT * service_s, SLACK_MIN * ttft_s) / service_s
    low, high = 0.0, BUSY_MAX
    for _ in range(_HALVINGS):
        busy = (low + high) / 2
        late = busy ** (math.sqrt(2 * (workers + 1)) - 1) * math.exp(-workers * (1 - busy) * slack)
        low, high = (busy, high) if late <= LATE else (low, busy)
    return max(high, SLACK_MIN)


@dataclass(frozen=True, slots=True)
class Rows:
    """How many answers a worker may decode at once, and why no more; `count` is at least 1."""

    count: float
    limit: Limit


def rows_that_fit(demand: Demand, promise: Promise, facts: WorkerFacts, role: Role = Role.DECODE) -> Rows:
    """On average, at one worker of this role."""
    pages = decode_pages(role, int(facts.kv_tokens), facts.longest_tokens)
    kv_tokens = facts.kv_tokens if pages is None else pages
    p = facts.cost
    each_s = p.row_s + p.context_s * demand.context_tokens
    by_gap = (promise.gap_s - p.base_s) / each_s if each_s > 0 else math.inf
    found = min(
        (HEADROOM * by_gap, Limit.GAP),
        (HEADROOM * kv_tokens / max(demand.kv_tokens, 1.0), Limit.KV),
        (HEADROOM * facts.batch_requests, Limit.BATCH),
        key=lambda each: each[0],
    )
    return Rows(max(found[0], 1.0), found[1])


def decode_strain(demand: Demand, promise: Promise, facts: WorkerFacts, workers: int) -> Strain:
    """Of `workers` that only decode."""
    p, fits = facts.cost, rows_that_fit(demand, promise, facts)
    step_s = p.base_s + fits.count * (p.row_s + p.context_s * demand.context_tokens)
    return Strain(demand.per_s * demand.answer_tokens / workers * step_s / fits.count, fits.limit)


def shared_strain(demand: Demand, promise: Promise, facts: WorkerFacts, workers: int, backlog_s: float = 0.0) -> Strain:
    """Of `workers` that do both. In a second, prompts take their time once and answers theirs once a step, so a step
    lasts base ÷ (1 - both parts); the load may grow until that is the gap target, or rows or time run out.
    """
    p, cost = facts.cost, StepCost(facts.cost)
    per_s = demand.per_s / workers
    prompts_s = per_s * (demand.prompt_seconds(cost, facts.chunk_tokens)) + backlog_s / workers
    answers_s = per_s * demand.answer_tokens * (p.row_s + p.context_s * demand.context_tokens)
    fits = rows_that_fit(demand, promise, facts, Role.BOTH)
    # Rows are tokens a second times a step, so the step may last until the rows that fit are there, too.
    by_rows_s = fits.count / max(per_s * demand.answer_tokens, 1e-9)
    longest_s = min(promise.gap_s * HEADROOM, max(by_rows_s, p.base_s))
    room = max(1.0 - p.base_s / longest_s, SLACK_MIN) if longest_s < math.inf else 1.0
    cap = min(room, busy_cap(workers, prompts_s / max(per_s, 1e-9), promise.ttft_s))
    by_gap = promise.gap_s * HEADROOM <= by_rows_s
    limit = fits.limit if not by_gap else Limit.GAP if room <= cap else Limit.TTFT
    return Strain((prompts_s + answers_s) / cap, limit)
