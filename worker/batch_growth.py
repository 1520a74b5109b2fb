"""How large the decode batch may grow before the inter-token target breaks for all who are in it."""

from collections.abc import Callable

from costs.step_cost import StepCost, StepWork


class BatchGrowth:
    """Asked by the step loop. Requests that may not join wait with their KV until others end, oldest first.

    Routers, who see the same costs, should not have sent them: this is the last fence, not the plan.
    """

    def __init__(self, cost: Callable[[], StepCost], itl_target_s: float | None) -> None:
        """`cost` gives the newest fit; no target, no limit."""
        self._cost = cost
        self._target_s = itl_target_s
        self._context = 0.0
        """Tokens of a row, on average, when there were rows."""

    def rows(self, running: StepWork, most: int) -> int:
        """Rows the next step may have, at least those that run already and at most `most`.

        Who joins is taken to have as much context as those that run or ran last. A target that a batch of one would
        miss limits nothing: it could not be met by making everybody wait.
        """
        if self._target_s is None:
            return most
        if running.decode_rows:
            self._context = running.decode_context_tokens / running.decode_rows
        p = self._cost().parameters
        spare = self._target_s - p.base_s
        row_s = p.row_s + p.context_s * self._context
        if spare < row_s or row_s <= 0.0:
            return most
        return min(most, max(running.decode_rows, int(spare / row_s)))
