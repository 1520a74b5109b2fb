"""How prompts share steps with decode rows, as worker and router both count on it."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from costs.step_cost import StepCost
from costs.step_grid import unpadded_prompts
from wire.messages import Duty
from wire.policy_name import CHUNKED_BUDGET, PolicyName

PIECE = 64
"""Fewer tokens than this are not worth a step of prompts: its kernels are launched for as many as for one."""
PATIENCE = 127
"""Steps between two in which prompts that else get less than a piece have enough: of an answer's gaps, less than one in
a hundred is so long, which is what targets for the 99th percentile bear. Shorter steps more often would break them all.
"""
PROGRESS_TOKENS = 2048
"""What they get in these steps."""
SPARE_STEPS = 2.0
"""Steps of one decode row, all alone, that an inter-token gap may last if no target was given."""
GAP_NOISE = 1.2
"""A gap at the client ÷ the step as predicted, for all but one in a hundred: steps differ, and their words' ways do."""
_WAY_NOISE = 0.05
"""What words' ways add to a gap, as a part of it: of `GAP_NOISE` it is what is not the steps'."""
FIRST_GAP_STEPS = 2
"""Steps between the first token of a prompt that is computed where it decodes, and the second: one runs by then."""


def mixed_noise(cost: StepCost) -> float:
    """A gap at the client ÷ the step as predicted, where it has prompts beside answers."""
    return cost.parameters.mixed_noise + _WAY_NOISE


def tightest_kept(targets: Sequence[float], decoding_s: float) -> float:
    """The smallest of the answers' `targets`, in seconds and rising, that decoding alone does not break; infinite if
    there is none.
    """
    place = bisect_right(targets, decoding_s)
    return targets[place] if place < len(targets) else math.inf


def gap_target(
    cost: StepCost, asked_s: float | None, rows: int, context_tokens: int, targets: Sequence[float] = ()
) -> float:
    """How long a step with so many decode rows may take as predicted, in seconds.

    Without `targets` of the answers (rising, infinite = of no class): what was asked for, else `SPARE_STEPS`. Where
    decoding alone takes longer than that, nobody's gaps are saved by prompts that wait: then they may double it.

    With targets no step breaks the tightest that can be kept; if all answers have one, and nothing was asked for, it
    may last as long as that. What is promised or asked for is held with the noise that was learned, what is usual with
    the usual one.
    """
    decoding_s = cost.decode_step_seconds(rows, context_tokens)
    kept_s = tightest_kept(targets, decoding_s)
    promised_s = (kept_s if asked_s is None else min(asked_s, kept_s)) / mixed_noise(cost)
    if asked_s is not None or (kept_s < math.inf and targets[-1] < math.inf):
        return promised_s
    idle_s = cost.decode_step_seconds(1, 0)
    usual_s = SPARE_STEPS * (idle_s if decoding_s <= SPARE_STEPS * idle_s else decoding_s)
    return min(usual_s / GAP_NOISE, promised_s)


def first_gap_target(cost: StepCost, rows: int, context_tokens: int, bears_s: float) -> float:
    """How long a step may take as predicted, in seconds, that is one of those between the first and the second token of
    an answer which bears `bears_s` there; infinite if decoding alone breaks that.
    """
    decoding_s = cost.decode_step_seconds(max(1, rows), context_tokens)
    return bears_s / FIRST_GAP_STEPS / mixed_noise(cost) if FIRST_GAP_STEPS * decoding_s <= bears_s else math.inf


class Chunks(NamedTuple):
    """Prompts go on with `tokens` in one step, after `pause` steps without any."""

    tokens: int
    pause: int = 0


class Beside(NamedTuple):
    """The decode rows of a step, the tokens of their context, and the targets of their answers (`gap_target`)."""

    rows: int
    context_tokens: int
    targets: Sequence[float] = ()


def keeps_targets(duty: Duty | None) -> bool:
    """Whether steps of a worker with this duty are as long as the targets of its answers allow."""
    return duty is not None and duty.step_policy is PolicyName.DECODE_PRIORITY


def steady_chunks(cost: StepCost, duty: Duty | None, most: int, rows: int) -> Chunks | None:
    """What steps of at most `most` tokens give to any prompts beside `rows` decode rows, by a worker's duty; None = as
    much as a target leaves, see `chunks_within`.
    """
    if not rows or duty is None or duty.step_policy is PolicyName.UNCHUNKED:
        return Chunks(max(1, most - rows))
    if keeps_targets(duty):
        return None
    tokens = (CHUNKED_BUDGET if duty.step_budget is None else duty.step_budget) - rows
    return _worthwhile(unpadded_prompts(tokens, rows, cost.parameters.tile_tokens), most - rows)


def chunks_within(target_s: float, cost: StepCost, most: int, beside: Beside, pairs_per_token: float) -> Chunks:
    """What a step of `target_s` seconds gives to prompts with so much attention a token, on average."""
    rows, context, _ = beside
    return _worthwhile(cost.tokens_within(target_s, rows, context, pairs_per_token), most - rows)


def chunks(cost: StepCost, duty: Duty | None, most: int, beside: Beside, pairs_per_token: float) -> Chunks:
    """What steps of at most `most` tokens give to prompts `beside` decode rows, by a worker's duty; `pairs_per_token`
    is the attention of a token of these prompts, on average.
    """
    steady = steady_chunks(cost, duty, most, beside.rows)
    if steady is not None:
        return steady
    target_s = gap_target(cost, duty.itl_target_s if duty else None, *beside)
    return chunks_within(target_s, cost, most, beside, pairs_per_token)


def seldom_chunks(most: int) -> Chunks:
    """What prompts get that else get less than a piece, in steps of at most so many of their tokens."""
    return Chunks(max(1, min(PROGRESS_TOKENS, most)), PATIENCE)


def _worthwhile(tokens: int, most: int) -> Chunks:
    return Chunks(min(tokens, most)) if tokens >= PIECE else seldom_chunks(most)
