"""How much of a step may be prompts, when requests decode beside them.

A prompt in a step makes everybody's next token late; a prompt that waits makes its own first token late. The policies
differ in whom they let wait. Without decode rows nobody is disturbed, and without prompts nothing is to be decided.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from costs.chunks import PATIENCE, PIECE, PROGRESS_TOKENS, first_gap_target, gap_target
from costs.step_cost import StepCost, StepWork
from costs.step_grid import unpadded_prompts
from prefill_worker.line import Waiting
from wire.errors import InvalidArgument
from wire.policy_name import CHUNKED_BUDGET, PolicyName

_PIECES = 8
"""Where steps are small: part of a budget that is a piece."""

Cost = Callable[[], StepCost]
"""The newest fit."""


@dataclass(frozen=True, slots=True)
class Bearing:
    """How long gaps between tokens may be that a step is part of, in seconds; infinite = any."""

    targets: Sequence[float] = ()
    """Of its answers, rising."""
    first_gap_s: float = math.inf
    """The tightest of those that wait for their second token, and whose prompt was computed here."""


ANYTHING = Bearing()


class StepPolicy(ABC):
    """Asked by the step loop before each step, on its thread."""

    @abstractmethod
    def prefill_tokens(self, decode_work: StepWork, waiting: Waiting, bearing: Bearing = ANYTHING) -> int:
        """Most prompt tokens of the step that has `decode_work` already; the engine's own limit comes on top."""


class Unchunked(StepPolicy):
    """Whole prompts join a step, as many as the engine takes: the first token soon, the others' next one late."""

    def __init__(self, max_step_tokens: int) -> None:
        self._most = max_step_tokens

    def prefill_tokens(self, decode_work: StepWork, waiting: Waiting, bearing: Bearing = ANYTHING) -> int:
        return self._most - decode_work.decode_rows


class Chunked(StepPolicy):
    """A step has at most `budget` tokens, so none takes longer than that many."""

    def __init__(self, budget: int, cost: Cost = StepCost) -> None:
        self._budget = budget
        self._cost = cost
        self._progress = _Progress(budget)

    def prefill_tokens(self, decode_work: StepWork, waiting: Waiting, bearing: Bearing = ANYTHING) -> int:
        rows = decode_work.decode_rows
        most = max(0, self._budget - rows)
        tokens = unpadded_prompts(most, rows, self._cost().parameters.tile_tokens) if rows else most
        return self._progress.at_least(tokens, waiting)


class DecodePriority(StepPolicy):
    """As many prompt tokens as keep the predicted step within the tightest inter-token target among the answers, or the
    worker's own; none if decoding alone is not within it.
    """

    def __init__(self, cost: Cost, itl_target_s: float | None, max_step_tokens: int) -> None:
        """No target: see `costs.chunks.gap_target`."""
        self._cost = cost
        self._target_s = itl_target_s
        self._most = max_step_tokens
        self._progress = _Progress(max_step_tokens)

    def prefill_tokens(self, decode_work: StepWork, waiting: Waiting, bearing: Bearing = ANYTHING) -> int:
        if not waiting.prompts:
            return self._progress.at_least(self._most - decode_work.decode_rows, waiting)
        cost, rows, context = self._cost(), decode_work.decode_rows, decode_work.decode_context_tokens
        usual_s = gap_target(cost, self._target_s, rows, context, bearing.targets) if rows else math.inf
        first_s = first_gap_target(cost, rows, context, bearing.first_gap_s)
        target_s = min(usual_s, first_s)
        if target_s == math.inf:
            return self._most
        fitting = self._fitting(cost, decode_work, waiting, target_s)
        if not rows:
            return fitting
        piece = fitting if self._progress.is_any(fitting, waiting) else 0
        # The few steps that a second token waits for starve nobody; one with enough for all prompts would break it.
        return piece if first_s < usual_s else self._progress.at_least(piece, waiting)

    def _fitting(self, cost: StepCost, decode_work: StepWork, waiting: Waiting, target_s: float) -> int:
        """The largest number of tokens, by bisection: seconds grow with them."""
        fits, too_many = 0, min(self._most - decode_work.decode_rows, waiting.tokens) + 1
        while too_many - fits > 1:
            tokens = (fits + too_many) // 2
            if cost.seconds(decode_work.with_chunk(tokens, waiting.context)) <= target_s:
                fits = tokens
            else:
                too_many = tokens
        return fits


class _Progress:
    """One step in more than `PATIENCE` has enough for prompts that wait and get less than a piece: none of them
    starves, and such long steps are too few to matter at the 99th percentile of an answer's gaps.
    """

    def __init__(self, budget: int) -> None:
        self._piece = min(PIECE, max(1, budget // _PIECES))
        self._enough = min(PROGRESS_TOKENS, budget)
        self._since = PATIENCE

    def is_any(self, tokens: int, waiting: Waiting) -> bool:
        """Whether it is a piece, or all there is."""
        return tokens >= min(self._piece, waiting.tokens)

    def at_least(self, tokens: int, waiting: Waiting) -> int:
        """For each step with answers in it, but for those that a second token waits for."""
        self._since += 1
        if not waiting.prompts or self._since <= PATIENCE or self.is_any(tokens, waiting):
            return tokens
        self._since = 0
        return self._enough


def make_policy(
    name: PolicyName, cost: Cost, *, budget: int | None, itl_target_s: float | None, max_step_tokens: int
) -> StepPolicy:
    """InvalidArgument for a budget below one token."""
    if budget is not None and budget < 1:
        raise InvalidArgument("step_budget", f"{budget} is less than 1")
    match name:
        case PolicyName.UNCHUNKED:
            return Unchunked(max_step_tokens)
        case PolicyName.CHUNKED:
            return Chunked(min(CHUNKED_BUDGET if budget is None else budget, max_step_tokens), cost)
        case PolicyName.DECODE_PRIORITY:
            return DecodePriority(cost, itl_target_s, max_step_tokens)
