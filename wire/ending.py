"""When a generation ends, how a failed one does, and how much KV it needs until then: one rule for both halves."""

from wire.errors import TandemError
from wire.messages import ErrorDetail, FinishReason, ModelFacts, RequestEvent, RequestRef, SamplingParams


def reason_to_end(
    token_id: int, index: int, prompt_tokens: int, sampling: SamplingParams, model: ModelFacts
) -> FinishReason | None:
    """Why the answer ends with token number `index` (from 0), or None: it goes on.

    The token itself is part of the answer. Stop strings are the router's.
    """
    if token_id in sampling.stop_token_ids or (not sampling.ignore_eos and token_id in model.eos_token_ids):
        return FinishReason.STOP
    return None if may_go_on(index + 1, prompt_tokens, sampling, model) else FinishReason.LENGTH


def may_go_on(tokens: int, prompt_tokens: int, sampling: SamplingParams, model: ModelFacts) -> bool:
    """Whether an answer that has `tokens` tokens has room for another."""
    return tokens < sampling.max_tokens and prompt_tokens + tokens < model.max_context


def kv_tokens(prompt_tokens: int, sampling: SamplingParams, model: ModelFacts) -> int:
    """Most positions whose KV this request stores: prompt and answer, all but the last token, which is never fed."""
    return max(prompt_tokens, min(prompt_tokens + sampling.max_tokens, model.max_context) - 1)


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold `tokens` positions."""
    return -(-tokens // page_tokens)


def failure_event(ref: RequestRef, error: TandemError) -> RequestEvent:
    """The last event of an attempt that ends with `error`."""
    detail = ErrorDetail(error.code, error.message, error.retry_after_s)
    return RequestEvent(ref, finish_reason=FinishReason.ERROR, error=detail)
