"""The size of prompt chunks in steps that also decode, as both worker and router compute it."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from tandem.cost_model.step_cost import StepCost, unpadded_prompts
from tandem.protocol.messages import Assignment
from tandem.protocol.policy_name import CHUNKED_BUDGET, PolicyName

MIN_CHUNK_TOKENS = 64
"""A smaller chunk is not computed: its kernels are launched for as many tokens as for one."""
FORCED_CHUNK_INTERVAL = 127
"""The number of steps between two forced chunks, for prompts whose chunks would otherwise be smaller than the minimum.
Less than 1 % of an answer's gaps contain one, which targets at the 99th percentile tolerate.
"""
FORCED_CHUNK_TOKENS = 32 * MIN_CHUNK_TOKENS
"""The size of a forced chunk."""


def strictest_feasible_target(targets: Sequence[float], decoding_s: float, asked_s: float | None = None) -> float:
    """Return the smallest of `asked_s` and those `targets` (sorted) that are above `decoding_s`; infinite without any.

    All are in seconds. A target that decoding alone misses is ignored: no chunk is small enough for it.
    """
    kept = bisect_right(targets, decoding_s)
    kept_s = targets[kept] if kept < len(targets) else math.inf
    return kept_s if asked_s is None else min(asked_s, kept_s)


def breaks_target(target_s: float, before_s: float, after_s: float) -> bool:
    """Return True if a gap target that steps of `before_s` keep is broken by steps of `after_s`, all in seconds."""
    return before_s <= target_s < after_s


class Chunks(NamedTuple):
    """One chunk of `tokens`, then `pause` steps without prompt tokens, and so on."""

    tokens: int
    pause: int = 0


class ConcurrentDecode(NamedTuple):
    """The decode rows of a step, their context tokens and gap targets: seconds, sorted, infinite for none."""

    rows: int
    context_tokens: int
    targets: Sequence[float] = ()


class StepLimit(NamedTuple):
    """The bounds of a step that computes both prompt tokens and decode rows."""

    tokens: int | None = None
    """The most prompt tokens; None = as many as the engine takes."""
    seconds: float = math.inf
    """The longest predicted duration of the step."""


def step_limit(cost: StepCost, assignment: Assignment | None, decode: ConcurrentDecode) -> StepLimit:
    """Return the limit of a step; without an assignment or decode rows there is none.

        seconds = min(itl_target_s, tightest kept target of the answers) / cost.margin

    Tokens: `chunked` has `step_budget`; `decode-priority` has it only while an answer has no target; `unchunked` has no
    token limit.
    """
    rows, context, targets = decode
    if assignment is None or not rows:
        return StepLimit()
    asked_s, policy = assignment.itl_target_s, assignment.step_policy
    target_s = strictest_feasible_target(targets, cost.decode_step_seconds(rows, context), asked_s)
    bounded = asked_s is not None or (target_s < math.inf and targets[-1] < math.inf)
    if policy is PolicyName.UNCHUNKED or (policy is PolicyName.DECODE_PRIORITY and bounded):
        return StepLimit(None, target_s / cost.margin)
    budget = CHUNKED_BUDGET if assignment.step_budget is None else assignment.step_budget
    return StepLimit(unpadded_prompts(max(0, budget - rows), rows, cost.parameters.tile_tokens), target_s / cost.margin)


def chunks_within(
    limit: StepLimit, cost: StepCost, most: int, decode: ConcurrentDecode, pairs_per_token: float
) -> Chunks:
    """Return the chunks within `limit` of steps of at most `most` tokens.

    `pairs_per_token` is the mean number of attention pairs of a prompt token.
    """
    rows, context, _ = decode
    headroom = max(1, most - rows)
    tokens = headroom if limit.tokens is None else min(headroom, limit.tokens)
    if limit.seconds < math.inf:
        tokens = min(tokens, cost.tokens_within(limit.seconds, rows, context, pairs_per_token))
    return Chunks(tokens) if tokens >= min(MIN_CHUNK_TOKENS, headroom) else forced_chunk(headroom)


def forced_chunk(most: int) -> Chunks:
    """Return the forced chunk, at most `most` tokens, and its interval."""
    return Chunks(max(1, min(FORCED_CHUNK_TOKENS, most)), FORCED_CHUNK_INTERVAL)
