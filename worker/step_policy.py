"""How many prompt tokens a step computes beside requests that decode.

Prompt tokens in a step delay the next token of every answer in it; a prompt that waits delays its own first token. The
limits of a step are `costs.chunks.step_limit`, which routers predict with as well. Without decode rows nobody is
delayed, and without prompts there is nothing to decide.
"""

import math
from collections.abc import Callable, Sequence

from costs.chunks import (
    FORCED_CHUNK_INTERVAL,
    FORCED_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    NO_LIMIT,
    ConcurrentDecode,
    step_limit,
)
from costs.step_cost import StepCost, StepWork
from prefill_worker.queue import WaitingPrompts
from wire.messages import Assignment
from wire.policy_name import CHUNKED_BUDGET, PolicyName

_PIECES = 8
"""Where steps are small: part of a budget that is a piece."""

Cost = Callable[[], StepCost]
"""The newest fit."""


class StepPolicy:
    """Decides the prompt tokens of each step by the worker's assignment. It is asked before each step that could have
    prompts.
    """

    def __init__(self, assignment: Assignment, cost: Cost, max_step_tokens: int) -> None:
        self._assignment = assignment
        self._cost = cost
        self._most = max_step_tokens
        if assignment.step_policy is PolicyName.CHUNKED:
            self._most = min(assignment.step_budget or CHUNKED_BUDGET, max_step_tokens)
        self._progress = _Progress(self._most)
        self.steps_without_prompts = 0
        """Steps since the last call that it was not asked about, as no prompt waited."""

    def prefill_tokens(self, decode_work: StepWork, waiting: WaitingPrompts, targets: Sequence[float] = ()) -> int:
        """Most prompt tokens of the step that has `decode_work` already; the engine's own limit comes on top. `targets`
        are the longest gaps between tokens that its answers tolerate, in seconds, rising.
        """
        self._progress.steps += self.steps_without_prompts
        self.steps_without_prompts = 0
        rows, context = decode_work.decode_rows, decode_work.decode_context_tokens
        most = max(0, self._most - rows)
        if not waiting.prompts:
            return self._progress.at_least(most, waiting)
        cost = self._cost()
        limit = step_limit(cost, self._assignment, ConcurrentDecode(rows, context, targets)) if rows else NO_LIMIT
        tokens = most if limit.tokens is None else min(most, limit.tokens)
        if limit.seconds < math.inf:
            tokens = self._fitting(cost, decode_work, waiting, limit.seconds, tokens)
        if not rows:
            return tokens
        return self._progress.at_least(tokens if self._progress.is_any(tokens, waiting) else 0, waiting)

    def _fitting(
        self, cost: StepCost, decode_work: StepWork, waiting: WaitingPrompts, target_s: float, most: int
    ) -> int:
        """The largest number of tokens up to `most` whose step is predicted to take `target_s` seconds or less, found
        by bisection: predicted seconds grow with the tokens.
        """
        fits, too_many = 0, min(most, waiting.tokens) + 1
        while too_many - fits > 1:
            tokens = (fits + too_many) // 2
            if cost.seconds(decode_work.with_chunk(tokens, waiting.context)) <= target_s:
                fits = tokens
            else:
                too_many = tokens
        return fits


class _Progress:
    """One step in more than `FORCED_CHUNK_INTERVAL` has enough for prompts that wait and get less than a minimal chunk:
    none of them starves, and such long steps are too few to matter at the 99th percentile of an answer's gaps.
    """

    def __init__(self, budget: int) -> None:
        self._piece = min(MIN_CHUNK_TOKENS, max(1, budget // _PIECES))
        self._enough = min(FORCED_CHUNK_TOKENS, budget)
        self.steps = FORCED_CHUNK_INTERVAL
        """Steps with answers in them since the last one with enough for prompts."""

    def is_any(self, tokens: int, waiting: WaitingPrompts) -> bool:
        """Whether it is a piece, or all there is."""
        return tokens >= min(self._piece, waiting.tokens)

    def at_least(self, tokens: int, waiting: WaitingPrompts) -> int:
        """Must be asked for each step with answers in it."""
        self.steps += 1
        if not waiting.prompts or self.steps <= FORCED_CHUNK_INTERVAL or self.is_any(tokens, waiting):
            return tokens
        self.steps = 0
        return self._enough
