"""Whether a request loads KV pages from a tier of the prefix cache, or computes their tokens again."""

from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import chunk_pairs


def saved_seconds(cost: StepCost, context: int, tokens: int, chunk: int, reload_s: float) -> float:
    """Return the seconds that a request saves if the KV of `tokens` prompt tokens is loaded; negative if it loses.

    The tokens follow `context` tokens whose KV is there. Without the reload, they would be computed in chunks of up to
    `chunk` tokens; the reload is predicted to take `reload_s` seconds.

        saved = prefill seconds of the tokens - reload_s
    """
    return cost.prefill_seconds(tokens, chunk_pairs(tokens, context), chunk)[0] - reload_s
