"""The definition of a load: due time, prompt blocks and answer length of each request."""

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.protocol.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a prompt: `tokens` token ids that are generated from `key`.

    Within a workload, blocks with equal keys have equal token ids, up to the length of the shorter block.
    """

    key: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: its due time in seconds after the start, its prompt, and the exact length of its answer."""

    due_s: float
    prompt: tuple[Block, ...]
    new_tokens: int
    messages: tuple[tuple[str, str], ...] = ()
    """A conversation of (role, content) pairs instead of the blocks, for servers that tokenize."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens; 0 for a conversation, whose length only the server knows."""
        return sum(block.tokens for block in self.prompt)

    def fitted(self, context: int) -> "Arrival":
        """Return the request shortened to fit into a context of `context` tokens.

        The answer is shortened to at most half of the context. If the prompt still does not fit, its end is cut off.
        """
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
    """Arrivals sorted by due time, all within `seconds`, at about `rate` per second.

    `seed` selects the token ids: another seed gives the same lengths and shared prefixes with other tokens, so that a
    second run hits no prefix cache entry of the first. `clipped` is the number of requests that were shortened to fit
    into a context.
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
                "workload", f"no request is due within {self.seconds:g} s; raise the rate or the seconds"
            )

    def fitted(self, context: int) -> "Workload":
        """Return the workload with every request shortened to fit into a model's context of `context` tokens."""
        fitted = tuple(arrival.fitted(context) for arrival in self.arrivals)
        clipped = sum(a != b for a, b in zip(fitted, self.arrivals, strict=True))
        return replace(self, arrivals=fitted, clipped=self.clipped + clipped)


def parse_rates(text: str, option: str = "--rates") -> list[float]:
    """Parse "1,2.5,4" into ascending rates.

    Raises InvalidArgument, which names `option`, unless all are numbers above 0.
    """
    try:
        rates = sorted(float(rate) for rate in text.split(","))
    except ValueError:
        raise InvalidArgument(option, f"{text!r} is no list of numbers") from None
    if not all(0 < rate < math.inf for rate in rates):
        raise InvalidArgument(option, f"{text!r} has a rate that is not above 0")
    return rates


class Source(Protocol):
    """A source of workloads, which creates one for any rate; equal arguments give equal workloads."""

    @property
    def name(self) -> str:
        """A short name that is valid in file names."""

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        """Return requests at `rate` per second for `seconds`.

        Raises InvalidArgument if the source has no such workload.
        """


def prompt_ids(prompt: tuple[Block, ...], seed: int, vocab_size: int) -> NDArray[np.int64]:
    """Return random token ids below `vocab_size` for a prompt; equal block keys and seeds give equal token ids."""
    return np.concatenate(
        [np.random.default_rng((seed, block.key)).integers(0, vocab_size, block.tokens) for block in prompt]
    )
