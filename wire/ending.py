"""When a generation ends, how a failed one does, and how much KV it needs until then: one rule for both halves."""

from dataclasses import dataclass

from wire.errors import TandemError
from wire.messages import (
    ErrorDetail,
    FinishReason,
    ModelFacts,
    RequestEvent,
    RequestRef,
    Role,
    SamplingParams,
    WorkerInfo,
)


@dataclass(frozen=True, slots=True)
class Ending:
    """When one answer ends, made once for all its tokens. Stop strings are the router's."""

    stops: frozenset[int]
    """Tokens behind which nothing comes; they are part of the answer."""
    limit: int
    """Most tokens of the answer."""
    least: int = 0
    """So many tokens it has at least, whatever they are."""

    @classmethod
    def of(cls, prompt_tokens: int, sampling: SamplingParams, model: ModelFacts) -> "Ending":
        stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= frozenset(model.eos_token_ids)
        return cls(stops, min(sampling.max_tokens, model.max_context - prompt_tokens), sampling.min_tokens)

    def reason(self, token_id: int, index: int) -> FinishReason | None:
        """Why the answer ends with token number `index` (from 0), or None: it goes on."""
        if token_id in self.stops and index >= self.least:
            return FinishReason.STOP
        return None if index + 1 < self.limit else FinishReason.LENGTH


def reason_to_end(
    token_id: int, index: int, prompt_tokens: int, sampling: SamplingParams, model: ModelFacts
) -> FinishReason | None:
    """Of a single token: see `Ending`."""
    return Ending.of(prompt_tokens, sampling, model).reason(token_id, index)


def kv_tokens(prompt_tokens: int, sampling: SamplingParams, model: ModelFacts) -> int:
    """Most positions whose KV this request stores: prompt and answer, all but the last token, which is never fed."""
    return max(prompt_tokens, min(prompt_tokens + sampling.max_tokens, model.max_context) - 1)


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold `tokens` positions."""
    return -(-tokens // page_tokens)


def decode_pages(role: Role, total: int, longest: int) -> int | None:
    """Most pages of `total` that answers may be promised, None = all: with both halves open, promises leave room for
    the `longest` prompt, else two such workers could wait for each other.
    """
    return None if role is not Role.BOTH else total - min(total // 2, longest)


def answer_tokens(worker: WorkerInfo) -> int:
    """Positions of answers, their prompts counted in, that a worker promises pages for, at most."""
    longest = pages_for(worker.model.max_context, worker.page_tokens)
    pages = decode_pages(worker.role, worker.pages_total, longest)
    return (worker.pages_total if pages is None else pages) * worker.page_tokens


def failure_event(ref: RequestRef, error: TandemError) -> RequestEvent:
    """The last event of an attempt that ends with `error`."""
    detail = ErrorDetail(error.code, error.message, error.retry_after_s)
    return RequestEvent(ref, finish_reason=FinishReason.ERROR, error=detail)
