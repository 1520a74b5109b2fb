"""Log probabilities of an answer's tokens, with the tokens' own bytes: what clients of gRPC and HTTP get to see."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from wire.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, its bytes (UTF-8, but maybe a part of a character only) and the logarithm of its probability."""

    token_id: int
    utf8: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token of the answer and the most likely ones in its place; `offset`: characters of the answer before it."""

    chosen: ScoredToken
    top: tuple[ScoredToken, ...]
    offset: int


def spell(token_id: int, logprobs: TokenLogprobs, offset: int, token_bytes: Callable[[int], bytes]) -> TokenScore:
    """What the engine says of one token, with bytes from `token_bytes`."""

    def top() -> Iterator[ScoredToken]:
        for other, logprob in zip(logprobs.top_ids, logprobs.top, strict=True):
            yield ScoredToken(other, token_bytes(other), logprob)

    return TokenScore(ScoredToken(token_id, token_bytes(token_id), logprobs.chosen), tuple(top()), offset)
