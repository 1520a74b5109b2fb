"""Limits the prompt tokens of a step that has decode rows.

Prompt tokens in a step delay the next token of every request that decodes in it; a prompt that waits delays its own
first token. The limits come from `tandem.cost_model.chunks.step_limit`, which routers use as well to predict steps.
"""

import math
from collections.abc import Callable, Sequence

from prefill_worker.queue import WaitingPrompts
from tandem.cost_model.chunks import (
    FORCED_CHUNK_INTERVAL,
    FORCED_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    ConcurrentDecode,
    step_limit,
)
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork
from tandem.protocol.messages import Assignment
from tandem.protocol.policy_name import CHUNKED_BUDGET, PolicyName

_BUDGET_CHUNKS = 8
"""The minimal chunk is at most the budget ÷ this number."""

Cost = Callable[[], StepCost]
"""Returns the newest fit of the cost model."""


class StepPolicy:
    """Limits the prompt tokens of each step, according to the worker's assignment."""

    def __init__(self, assignment: Assignment, cost: Cost, max_step_tokens: int) -> None:
        self._assignment = assignment
        self._cost = cost
        self._most = max_step_tokens
        if assignment.step_policy is PolicyName.CHUNKED:
            self._most = min(assignment.step_budget or CHUNKED_BUDGET, max_step_tokens)
        self._progress = _Progress(self._most)
        self.steps_without_prompts = 0
        """The number of steps without waiting prompts since the last call of `prefill_tokens`."""

    def prefill_tokens(self, decode_work: StepWork, waiting: WaitingPrompts, targets: Sequence[float] = ()) -> int:
        """Return the maximum number of prompt tokens of a step with `decode_work`.

        The engine's own limit applies as well. `targets` are the maximum inter-token gaps that the decoding requests
        allow, in seconds, ascending.
        """
        self._progress.steps += self.steps_without_prompts
        self.steps_without_prompts = 0
        rows, context = decode_work.decode_rows, decode_work.decode_context_tokens
        most = max(0, self._most - rows)
        if not waiting.prompts:
            return self._progress.at_least(most, waiting)
        if not rows:
            return most
        cost = self._cost()
        limit = step_limit(cost, self._assignment, ConcurrentDecode(rows, context, targets), waiting.wait_s)
        tokens = most if limit.tokens is None else min(most, limit.tokens)
        if limit.seconds < math.inf:
            tokens = self._fitting(cost, decode_work, waiting, limit.seconds, tokens)
        return self._progress.at_least(tokens if self._progress.is_chunk(tokens, waiting) else 0, waiting)

    def _fitting(
        self, cost: StepCost, decode_work: StepWork, waiting: WaitingPrompts, target_s: float, most: int
    ) -> int:
        """Return the maximum number of prompt tokens with which a step is predicted to take at most `target_s` seconds.

        The result is at most `most`. The predicted duration grows with the tokens, so the number is found by bisection.
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
    """Forces a chunk if a step would give waiting prompts less than the minimal chunk.

    So no prompt starves. There are at least `FORCED_CHUNK_INTERVAL` steps between two forced chunks, so their long
    steps are too rare to raise the 99th percentile of a request's gaps.
    """

    def __init__(self, budget: int) -> None:
        self._minimal_chunk = min(MIN_CHUNK_TOKENS, max(1, budget // _BUDGET_CHUNKS))
        self._forced_chunk = min(FORCED_CHUNK_TOKENS, budget)
        self.steps = FORCED_CHUNK_INTERVAL
        """Number of counted steps since the last forced chunk, with or without prompt tokens."""

    def is_chunk(self, tokens: int, waiting: WaitingPrompts) -> bool:
        """Return True if `tokens` is at least the minimal chunk, or covers all waiting prompt tokens."""
        return tokens >= min(self._minimal_chunk, waiting.tokens)

    def at_least(self, tokens: int, waiting: WaitingPrompts) -> int:
        """Count a step, and return the maximum number of its prompt tokens.

        It is the size of a forced chunk if one is due, else `tokens`. A forced chunk is due if prompts wait, `tokens`
        is less than a chunk (`is_chunk`), and more than `FORCED_CHUNK_INTERVAL` steps, this one included, were counted
        since the last forced chunk. The first forced chunk is due without that wait.
        """
        self.steps += 1
        if not waiting.prompts or self.steps <= FORCED_CHUNK_INTERVAL or self.is_chunk(tokens, waiting):
            return tokens
        self.steps = 0
        return self._forced_chunk
