"""Log probabilities of the tokens of answers and prompts, with the tokens' bytes; replies are made from them."""

import math
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from tandem.protocol.messages import PromptLogprobs, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, its UTF-8 bytes (possibly an incomplete character), and its log probability."""

    token_id: int
    utf8: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The score of one token and its most likely alternatives; `offset` is the number of characters before it."""

    chosen: ScoredToken
    top: tuple[ScoredToken, ...]
    offset: int


def format_logprobs(
    token_id: int, logprobs: TokenLogprobs, offset: int, token_bytes: Callable[[int], bytes]
) -> TokenScore:
    """Convert the engine's log probabilities of one token; `token_bytes` returns the bytes of a token."""

    def top() -> Iterator[ScoredToken]:
        for alternative, logprob in zip(logprobs.top_ids, logprobs.top, strict=True):
            yield ScoredToken(alternative, token_bytes(alternative), logprob)

    return TokenScore(ScoredToken(token_id, token_bytes(token_id), logprobs.chosen), tuple(top()), offset)


def format_prompt_logprobs(
    ids: Sequence[int], logprobs: PromptLogprobs, token_bytes: Callable[[int], bytes]
) -> list[TokenScore]:
    """Return the scores of a prompt's tokens; the first one's log probability is NaN, because no token precedes it."""
    decoder = getincrementaldecoder("utf-8")("replace")
    scores, offset = list[TokenScore](), 0
    for token_id, token_logprobs in zip(ids, chain((TokenLogprobs(math.nan),), logprobs.tokens()), strict=True):
        scores.append(format_logprobs(token_id, token_logprobs, offset, token_bytes))
        offset += len(decoder.decode(token_bytes(token_id)))
    return scores
