"""Log probabilities of an answer's tokens with the tokens' bytes, in the form for clients."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from wire.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, its UTF-8 bytes (possibly a partial character), and its log probability."""

    token_id: int
    utf8: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token of the answer with the most likely alternatives; `offset` is the number of characters before it."""

    chosen: ScoredToken
    top: tuple[ScoredToken, ...]
    offset: int


def spell(token_id: int, logprobs: TokenLogprobs, offset: int, token_bytes: Callable[[int], bytes]) -> TokenScore:
    """Add the bytes of `token_bytes` to the engine's log probabilities of one token."""

    def top() -> Iterator[ScoredToken]:
        for other, logprob in zip(logprobs.top_ids, logprobs.top, strict=True):
            yield ScoredToken(other, token_bytes(other), logprob)

    return TokenScore(ScoredToken(token_id, token_bytes(token_id), logprobs.chosen), tuple(top()), offset)
