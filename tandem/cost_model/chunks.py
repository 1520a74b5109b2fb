"""The size of prefill chunks in steps that also decode; workers and routers compute it with the same code."""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from tandem.cost_model.step_cost import StepCost, unpadded_prompts
from tandem.cost_model.step_work import StepWork, chunk_pairs
from tandem.protocol.messages import Assignment
from tandem.protocol.policy_name import BACKLOG_BUDGET, CHUNKED_BUDGET, PolicyName

MIN_CHUNK_TOKENS = 64
"""Minimum number of tokens of a chunk; the same kernels would be launched for a smaller one."""
FORCED_CHUNK_INTERVAL = 127
"""Minimum number of steps between two forced chunks.

A chunk is forced if the limits of its step would allow fewer than `MIN_CHUNK_TOKENS` prompt tokens. With this interval,
less than 1 % of an answer's inter-token gaps contain a forced chunk; ITL targets for the 99th percentile tolerate this.
"""
FORCED_CHUNK_TOKENS = 32 * MIN_CHUNK_TOKENS
"""The size of a forced chunk, in tokens."""
RECENT_PROMPTS = 128
"""The number of prompts whose waits are averaged; a burst has fewer. See docs/decisions/step_policy.md."""


def strictest_feasible_target(targets: Sequence[float], decoding_s: float, asked_s: float | None = None) -> float:
    """Return the strictest ITL target that a step can still meet, in seconds; infinite if there is none.

    `targets` are the requests' ITL targets, ascending. Targets of at most `decoding_s`, the duration of a step with
    decode rows alone, are ignored, because any addition to the step misses them. `asked_s`, the worker's own target, is
    never ignored, even if it is at most `decoding_s`; None = no such target. All are in seconds.
    """
    kept = bisect_right(targets, decoding_s)
    kept_s = targets[kept] if kept < len(targets) else math.inf
    return kept_s if asked_s is None else min(asked_s, kept_s)


def breaks_target(target_s: float, before_s: float, after_s: float) -> bool:
    """Return True if steps of `before_s` seconds meet an ITL target that steps of `after_s` seconds would miss."""
    return before_s <= target_s < after_s


class Chunks(NamedTuple):
    """A sequence of prefill chunks of `tokens` tokens; `pause` steps without prompt tokens follow each chunk."""

    tokens: int
    pause: int = 0


class ConcurrentDecode(NamedTuple):
    """The decode rows of a step: their number, total context tokens, and ITL targets in seconds.

    The targets are ascending, infinite for a request without a target.
    """

    rows: int
    context_tokens: int
    targets: Sequence[float] = ()


class RecentPrompts:
    """The last `RECENT_PROMPTS` prompts that a worker has started, from which a backlog of prompts is recognized.

    There is a backlog while these prompts waited longer in the router's queue, on average, than they take to compute.
    The worker's own queue does not show it: a short burst fills that queue too, and the router keeps the other prompts.
    """

    def __init__(self) -> None:
        self._prompts = deque[tuple[float, int]](maxlen=RECENT_PROMPTS)
        self.wait_s = 0.0
        """Mean seconds in the router's queue per prompt token to compute; 0 before `RECENT_PROMPTS` prompts."""

    def add(self, waited_s: float, tokens: int) -> None:
        """Add a prompt that waited `waited_s` seconds in the router's queue and has `tokens` > 0 tokens to compute."""
        self._prompts.append((waited_s, tokens))
        if len(self._prompts) == RECENT_PROMPTS:
            waits_s, lengths = zip(*self._prompts, strict=True)
            self.wait_s = sum(waits_s) / sum(lengths)


class StepLimit(NamedTuple):
    """The limits of a step that has both prompt tokens and decode rows."""

    tokens: int | None = None
    """Maximum number of prompt tokens; None = as many as the engine accepts."""
    seconds: float = math.inf
    """Maximum predicted duration of the step in seconds."""


def step_limit(
    cost: StepCost, assignment: Assignment | None, decode: ConcurrentDecode, wait_s: float = 0.0
) -> StepLimit:
    """Return the limits on the next step's duration and prompt tokens.

    There is no limit if `assignment` is None or if no row decodes.

        seconds = min(itl_target_s, strictest feasible ITL target of the decoding requests) / cost.margin

    The token limit depends on the policy: `chunked` has `step_budget`; `decode-priority` has `step_budget` only while a
    decoding request has no ITL target; `unchunked` has none. The default of `step_budget` is `CHUNKED_BUDGET`. For
    `decode-priority` it grows during a backlog, in proportion to the prompts' wait and up to `BACKLOG_BUDGET`:

        budget = CHUNKED_BUDGET · wait_s ÷ seconds to compute a token in steps of CHUNKED_BUDGET tokens

    `wait_s` is `RecentPrompts.wait_s` of the worker; routers do not know it and predict steps without a backlog.
    """
    rows, context, targets = decode
    if assignment is None or not rows:
        return StepLimit()
    asked_s, policy = assignment.itl_target_s, assignment.step_policy
    target_s = strictest_feasible_target(targets, cost.decode_step_seconds(rows, context), asked_s)
    bounded = asked_s is not None or (target_s < math.inf and targets[-1] < math.inf)
    if policy is PolicyName.UNCHUNKED or (policy is PolicyName.DECODE_PRIORITY and bounded):
        return StepLimit(None, target_s / cost.margin)
    tokens = _prompts_within(assignment.step_budget or CHUNKED_BUDGET, cost, rows)
    if wait_s and policy is PolicyName.DECODE_PRIORITY and assignment.step_budget is None:
        step = StepWork(tokens, chunk_pairs(tokens, 0), rows, context)
        backlog = wait_s * tokens / cost.seconds(step)
        if backlog > 1.0:
            tokens = _prompts_within(min(int(backlog * CHUNKED_BUDGET), BACKLOG_BUDGET), cost, rows)
    return StepLimit(tokens, target_s / cost.margin)


def _prompts_within(budget: int, cost: StepCost, rows: int) -> int:
    """Return the number of prompt tokens in a step of `budget` tokens with `rows` decode rows."""
    return unpadded_prompts(max(0, budget - rows), rows, cost.parameters.tile_tokens)


def chunks_within(
    limit: StepLimit, cost: StepCost, most: int, decode: ConcurrentDecode, pairs_per_token: float
) -> Chunks:
    """Return the chunks to compute within `limit`, in steps of at most `most` tokens, decode rows included.

    These are forced chunks if the limit allows fewer than `MIN_CHUNK_TOKENS` tokens. `pairs_per_token` is the mean
    number of attention pairs of a prompt token.
    """
    rows, context, _ = decode
    headroom = max(1, most - rows)
    tokens = headroom if limit.tokens is None else min(headroom, limit.tokens)
    if limit.seconds < math.inf:
        tokens = min(tokens, cost.tokens_within(limit.seconds, rows, context, pairs_per_token))
    return Chunks(tokens) if tokens >= min(MIN_CHUNK_TOKENS, headroom) else forced_chunk(headroom)


def forced_chunk(most: int) -> Chunks:
    """Return forced chunks of at most `most` tokens, with `FORCED_CHUNK_INTERVAL` steps after each of them."""
    return Chunks(max(1, min(FORCED_CHUNK_TOKENS, most)), FORCED_CHUNK_INTERVAL)
