"""How prompts share steps with decode rows, as worker and router both count on it."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from costs.step_cost import StepCost
from costs.step_grid import unpadded_prompts
from wire.messages import Assignment
from wire.policy_name import CHUNKED_BUDGET, PolicyName

MIN_CHUNK_TOKENS = 64
"""Fewer tokens than this are not worth a step of prompts: its kernels are launched for as many as for one."""
FORCED_CHUNK_INTERVAL = 127
"""Steps between two in which prompts that else get less than a piece have enough: of an answer's gaps, less than one in
a hundred is so long, which is what targets for the 99th percentile bear. Shorter steps more often would break them all.
"""
FORCED_CHUNK_TOKENS = 2048
"""What they get in these steps."""


def tightest_kept(targets: Sequence[float], decoding_s: float) -> float:
    """The smallest of the answers' `targets`, in seconds and rising, that decoding alone does not break; infinite if
    there is none.
    """
    place = bisect_right(targets, decoding_s)
    return targets[place] if place < len(targets) else math.inf


class Chunks(NamedTuple):
    """Prompts go on with `tokens` in one step, after `pause` steps without any."""

    tokens: int
    pause: int = 0


class ConcurrentDecode(NamedTuple):
    """The decode rows of a step, the tokens of their context, and the longest gaps between tokens that their answers
    tolerate: in seconds, rising, infinite for an answer without a target.
    """

    rows: int
    context_tokens: int
    targets: Sequence[float] = ()


class StepLimit(NamedTuple):
    """The bounds of a step that computes prompts beside decode rows."""

    tokens: int | None = None
    """Most prompt tokens; None = as many as the engine takes."""
    seconds: float = math.inf
    """Longest duration of the step as the cost model predicts it."""


NO_LIMIT = StepLimit()


def step_limit(cost: StepCost, assignment: Assignment | None, beside: ConcurrentDecode) -> StepLimit:
    """The limit of a step beside at least one decode row. No assignment (a worker that was not told one) means no limit.

    Seconds: whatever the step policy, a step is no longer than the tightest target of its answers that decoding alone
    does not exceed already, nor than the assignment's `itl_target_s`, each divided by `cost.margin`. Shortening steps
    for a target that is lost anyway would help nobody.

    Tokens: `chunked` never has more than `step_budget` in a step. `decode-priority` has that limit only for the sake
    of answers without a target: where every answer has one, the seconds say enough. `unchunked` has none.
    """
    if assignment is None:
        return NO_LIMIT
    rows, context, targets = beside
    asked_s, kept_s = assignment.itl_target_s, math.inf
    if targets and targets[0] < math.inf:
        kept_s = tightest_kept(targets, cost.decode_step_seconds(rows, context))
    limit_s = (kept_s if asked_s is None else min(asked_s, kept_s)) / cost.margin
    bounded = asked_s is not None or (kept_s < math.inf and targets[-1] < math.inf)
    if assignment.step_policy is PolicyName.UNCHUNKED or (
        assignment.step_policy is PolicyName.DECODE_PRIORITY and bounded
    ):
        return StepLimit(None, limit_s)
    budget = CHUNKED_BUDGET if assignment.step_budget is None else assignment.step_budget
    return StepLimit(unpadded_prompts(max(0, budget - rows), rows, cost.parameters.tile_tokens), limit_s)


def chunks_within(
    limit: StepLimit, cost: StepCost, most: int, beside: ConcurrentDecode, pairs_per_token: float
) -> Chunks:
    """The prompt tokens of each step of at most `most` tokens within `limit`; `pairs_per_token` is the attention of a
    prompt token, on average.
    """
    rows, context, _ = beside
    room = max(1, most - rows)
    tokens = room if limit.tokens is None else min(room, limit.tokens)
    if limit.seconds < math.inf:
        tokens = min(tokens, cost.tokens_within(limit.seconds, rows, context, pairs_per_token))
    return Chunks(tokens) if tokens >= min(MIN_CHUNK_TOKENS, room) else forced_chunk(room)


def chunks(
    cost: StepCost, assignment: Assignment | None, most: int, beside: ConcurrentDecode, pairs_per_token: float
) -> Chunks:
    """The prompt tokens of each step of at most `most` tokens beside these decode rows, by a worker's assignment."""
    limit = step_limit(cost, assignment, beside) if beside.rows else NO_LIMIT
    return chunks_within(limit, cost, most, beside, pairs_per_token)


def forced_chunk(most: int) -> Chunks:
    """What prompts get that else get less than a piece, in steps of at most so many of their tokens."""
    return Chunks(max(1, min(FORCED_CHUNK_TOKENS, most)), FORCED_CHUNK_INTERVAL)
