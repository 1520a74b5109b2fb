"""The rules that determine the end of an answer and its number of KV pages; schedulers and routers apply them."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.protocol.errors import TandemError
from tandem.protocol.messages import (
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
    """The conditions that end an answer, except stop strings, which the router checks."""

    stops: frozenset[int]
    """Token ids that end the answer; they are part of it."""
    limit: int
    """Maximum number of tokens of the answer."""
    least: int = 0
    """Minimum number of tokens that precede a stop token id if it ends the answer (`min_tokens`)."""

    @classmethod
    def of(cls, prompt_tokens: int, sampling: SamplingParams, model: ModelFacts) -> "Ending":
        """Return the end conditions of the answer to a prompt of `prompt_tokens` tokens."""
        stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= frozenset(model.eos_token_ids)
        return cls(stops, min(sampling.max_tokens, model.max_context - prompt_tokens), sampling.min_tokens)

    def reason(self, token_id: int, index: int) -> FinishReason | None:
        """Return the finish reason if this token ends the answer, else None.

        `index` is its position in the answer, from 0.
        """
        if token_id in self.stops and index >= self.least:
            return FinishReason.STOP
        return None if index + 1 < self.limit else FinishReason.LENGTH

    def cut(self, token_ids: Sequence[int], first_index: int) -> tuple[Sequence[int], bool]:
        """Return the tokens up to and including the one that ends the answer, and whether one does.

        `first_index` is the position of the first of these tokens in the answer, from 0.
        """
        if first_index + len(token_ids) < self.limit and self.stops.isdisjoint(token_ids):
            return token_ids, False
        for count, token_id in enumerate(token_ids, 1):
            if self.reason(token_id, first_index + count - 1) is not None:
                return token_ids[:count], True
        return token_ids, False


def reason_to_end(
    token_id: int, index: int, prompt_tokens: int, sampling: SamplingParams, model: ModelFacts
) -> FinishReason | None:
    """Return the finish reason for a single token; see `Ending.reason`."""
    return Ending.of(prompt_tokens, sampling, model).reason(token_id, index)


def kv_tokens(prompt_tokens: int, sampling: SamplingParams, model: ModelFacts) -> int:
    """Return the maximum number of tokens whose KV a request stores: prompt and answer without the last token."""
    return max(prompt_tokens, min(prompt_tokens + sampling.max_tokens, model.max_context) - 1)


def pages_for(tokens: int, page_tokens: int) -> int:
    """Return the number of pages for the KV of `tokens` tokens."""
    return -(-tokens // page_tokens)


def decode_pages(role: Role, total: int, longest: int) -> int | None:
    """Return how many of a worker's `total` pages may be reserved for decoding requests; None = all.

    A worker with both schedulers open keeps `longest` pages free for prompts, but at most half of its pages. Otherwise
    two workers could wait for each other's pages.
    """
    return None if role is not Role.BOTH else total - min(total // 2, longest)


def answer_pages(worker: WorkerInfo) -> int:
    """Return the number of pages that the worker can reserve for all decoding requests together."""
    pages = decode_pages(worker.role, worker.pages_total, worker.kv_pages.held(worker.model.max_context))
    return worker.pages_total if pages is None else pages


def answer_tokens(worker: WorkerInfo) -> int:
    """Return the maximum number of tokens, prompt and answer, for which the worker can reserve pages."""
    return worker.kv_pages.tokens_in(answer_pages(worker), decoding=not worker.role.prefills)


def failure_event(ref: RequestRef, error: TandemError) -> RequestEvent:
    """Return the event that ends an attempt with `error`."""
    detail = ErrorDetail(error.code, error.message, error.retry_after_s)
    return RequestEvent(ref, finish_reason=FinishReason.ERROR, error=detail)
