"""When a generation ends, and how much KV it needs until then: one rule for both halves of a worker."""

from wire.messages import FinishReason, ModelFacts, SamplingParams


def reason_to_end(
    token_id: int, index: int, prompt_tokens: int, sampling: SamplingParams, model: ModelFacts
) -> FinishReason | None:
    """Why the answer ends with token number `index` (from 0), or None: it goes on.

    The token itself is part of the answer. Stop strings are the router's.
    """
    if token_id in sampling.stop_token_ids or (not sampling.ignore_eos and token_id in model.eos_token_ids):
        return FinishReason.STOP
    if index + 1 >= sampling.max_tokens or prompt_tokens + index + 1 >= model.max_context:
        return FinishReason.LENGTH
    return None


def kv_tokens(prompt_tokens: int, sampling: SamplingParams, model: ModelFacts) -> int:
    """Most positions whose KV this request stores: prompt and answer, all but the last token, which is never fed."""
    return max(prompt_tokens, min(prompt_tokens + sampling.max_tokens, model.max_context) - 1)


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold `tokens` positions."""
    return -(-tokens // page_tokens)
