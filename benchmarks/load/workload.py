"""What a load consists of: when each request is due, what its prompt is made of, and how long its answer is."""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wire.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Block:
    """`tokens` token ids named by `key`: in one workload equal keys give equal ids, as far as both blocks reach."""

    key: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds after the start at which it is due, its prompt, and the exact length of its answer."""

    due_s: float
    prompt: tuple[Block, ...]
    new_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return sum(block.tokens for block in self.prompt)

    def fitted(self, context: int) -> "Arrival":
        """The same within `context` tokens: an answer of at most half of them, of the prompt its beginning."""
        answer = min(self.new_tokens, context // 2)
        if answer + self.prompt_tokens <= context:
            return replace(self, new_tokens=answer)
        return replace(self, prompt=_first_tokens(self.prompt, context - answer), new_tokens=answer)


def _first_tokens(prompt: tuple[Block, ...], tokens: int) -> tuple[Block, ...]:
    kept = []
    for block in prompt:
        if tokens <= 0:
            break
        kept.append(Block(block.key, min(block.tokens, tokens)))
        tokens -= block.tokens
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals in the order they are due, all within `seconds`, at about `rate` a second.

    `seed` chooses the token ids: with another one the same lengths and shared prefixes are made of other tokens, so
    that a second pass finds nothing of the first in a prefix cache. `clipped` counts requests cut to a context.
    """

    name: str
    rate: float
    seconds: float
    seed: int
    arrivals: tuple[Arrival, ...]
    clipped: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise InvalidArgument("--seed", f"{self.seed} is less than 0")
        if not self.arrivals:
            raise InvalidArgument(
                "workload", f"no request is due within {self.seconds:g} s; raise --seconds or --rates"
            )

    def fitted(self, context: int) -> "Workload":
        """Every request cut to what a model of `context` tokens can take."""
        fitted = tuple(arrival.fitted(context) for arrival in self.arrivals)
        clipped = sum(a != b for a, b in zip(fitted, self.arrivals, strict=True))
        return replace(self, arrivals=fitted, clipped=self.clipped + clipped)


class Source(Protocol):
    """Makes workloads of one kind at any rate; the same arguments give the same workload."""

    @property
    def name(self) -> str:
        """Short, and good for a file name."""

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        """Requests at `rate` a second for `seconds`. InvalidArgument if the source cannot give that."""


def prompt_ids(prompt: tuple[Block, ...], seed: int, vocab_size: int) -> NDArray[np.int64]:
    """The token ids of a prompt, each below `vocab_size`: arbitrary, but the same for the same keys and seed."""
    return np.concatenate(
        [np.random.default_rng((seed, block.key)).integers(0, vocab_size, block.tokens) for block in prompt]
    )
