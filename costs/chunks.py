"""How prompts share steps with decode rows, as worker and router both count on it."""

from typing import NamedTuple

from costs.step_cost import StepCost
from wire.messages import Duty
from wire.policy_name import CHUNKED_BUDGET, PolicyName

PIECE = 64
"""Fewer tokens than this are not worth a step of prompts: its kernels are launched for as many as for one."""
PATIENCE = 16
"""Steps in a row in which prompts may get less than a piece."""
PROGRESS_TOKENS = 256
"""What they get in the step after these."""
SPARE_STEPS = 2.0
"""Steps of one decode row, all alone, that an inter-token gap may last if no target was given."""


def gap_target(cost: StepCost, asked_s: float | None, rows: int, context_tokens: int) -> float:
    """How long a step with so many decode rows may take, in seconds: what was asked for, else `SPARE_STEPS`. Where
    decoding alone takes longer than that, nobody's gaps are saved by prompts that wait: then they may double it.
    """
    if asked_s is not None:
        return asked_s
    target_s, decoding_s = SPARE_STEPS * cost.decode_step_seconds(1, 0), cost.decode_step_seconds(rows, context_tokens)
    return target_s if decoding_s <= target_s else SPARE_STEPS * decoding_s


class Chunks(NamedTuple):
    """Prompts go on with `tokens` in one step, after `pause` steps without any."""

    tokens: int
    pause: int = 0


def chunks(cost: StepCost, duty: Duty | None, most: int, beside: tuple[int, int], pairs_per_token: float) -> Chunks:
    """What steps of at most `most` tokens give to prompts `beside` (decode rows, their context in tokens), by a
    worker's duty; `pairs_per_token` is the attention of a token of these prompts, on average.
    """
    rows, context = beside
    if not rows or duty is None or duty.step_policy is PolicyName.UNCHUNKED:
        return Chunks(max(1, most - rows))
    if duty.step_policy is PolicyName.CHUNKED:
        tokens = (CHUNKED_BUDGET if duty.step_budget is None else duty.step_budget) - rows
    else:
        target_s = gap_target(cost, duty.itl_target_s, rows, context)
        tokens = cost.tokens_within(target_s, rows, context, pairs_per_token)
    if tokens >= PIECE:
        return Chunks(min(tokens, most - rows))
    return Chunks(PROGRESS_TOKENS, PATIENCE)
