"""How large the decode batch may grow before the inter-token target breaks for all who are in it."""

import math
from collections.abc import Callable, Sequence

from costs.chunks import tightest_kept
from costs.step_cost import StepCost, StepWork


class BatchGrowth:
    """Asked by the step loop. Requests that may not join wait with their KV until others end, oldest first.

    Routers, who see the same costs, should not have sent them: this is the last fence, not the plan.
    """

    def __init__(self, cost: Callable[[], StepCost], itl_target_s: float | None) -> None:
        """`cost` gives the newest fit; no target here or of an answer, no limit."""
        self._cost = cost
        self._target_s = itl_target_s
        self._context = 0.0
        """Tokens of a row, on average, when there were rows."""

    def rows(self, running: StepWork, most: int, targets: Sequence[float] = ()) -> int:
        """Rows the next step may have, at least those that run already and at most `most`; `targets` are those of the
        answers that run, in seconds and rising.

        Who joins is taken to have as much context as those that run or ran last. A target that a batch of one would
        miss limits nothing: it could not be met by making everybody wait.
        """
        cost = self._cost()
        decoding_s = cost.decode_step_seconds(running.decode_rows, running.decode_context_tokens)
        target_s = tightest_kept(targets, decoding_s)
        if self._target_s is not None:
            target_s = min(self._target_s, target_s)
        if target_s == math.inf:
            return most
        if running.decode_rows:
            self._context = running.decode_context_tokens / running.decode_rows
        p = cost.parameters
        spare = target_s - p.base_s
        row_s = p.row_s + p.context_s * self._context
        if spare < row_s or row_s <= 0.0:
            return most
        return min(most, max(running.decode_rows, int(spare / row_s)))
