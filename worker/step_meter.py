"""How long steps took, and what was in them: what the cost model learns from."""

import time
from collections.abc import Callable, Sequence

from costs.step_cost import CostParameters, StepCost, StepWork, chunk_pairs
from costs.step_fit import StepFit
from engine.steps.batch import StepRow, TokenRows


def decode_work(rows: TokenRows) -> StepWork:
    """Of rows of one token each."""
    return StepWork(decode_rows=len(rows), decode_context_tokens=rows.context_tokens)


def with_prompts(work: StepWork, rows: Sequence[StepRow]) -> StepWork:
    """And rows of prompts."""
    if not rows:
        return work
    tokens, pairs = 0, 0.0
    for row in rows:
        chunk = len(row.token_ids)
        tokens += chunk
        pairs += chunk_pairs(chunk, row.start)
    return StepWork(tokens, pairs, work.decode_rows, work.decode_context_tokens)


class StepMeter:
    """Engine thread, but for `parameters`, which any thread may read.

    A step that was launched while another ran has begun when that one's results were here: back to back, from result to
    result, is the time tokens take to follow each other. After a gap it has begun with its own schedule.
    """

    def __init__(
        self,
        guess: CostParameters,
        clock: Callable[[], float] = time.perf_counter,
        tell: Callable[[StepWork, float, float], None] = lambda _work, _seconds, _predicted_s: None,
    ) -> None:
        """`guess` is what predictions begin with; `clock` in seconds; `tell` hears of each step, of the seconds
        that it took, and of those that were predicted.
        """
        self._fit = StepFit(guess)
        self._clock = clock
        self.tell = tell
        self._last_end = float("-inf")

    @property
    def parameters(self) -> CostParameters:
        """The newest fit, and how good it is."""
        return self._fit.parameters

    def cost(self) -> StepCost:
        """Predicts with the newest fit."""
        return StepCost(self._fit.parameters)

    def begin(self) -> float:
        """Now: give it back with the step's end."""
        return self._clock()

    def end(self, began: float) -> float:
        """The results of a step are here → how many seconds it took; `learn` of it when nobody waits any more."""
        now = self._clock()
        seconds, self._last_end = now - max(began, self._last_end), now
        return seconds

    def learn(self, work: StepWork, seconds: float) -> None:
        """A step with this work took so long."""
        predicted_s = self._fit.observe(work, seconds)
        self.tell(work, seconds, predicted_s)
