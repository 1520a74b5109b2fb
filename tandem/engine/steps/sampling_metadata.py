"""What the sampler reads of a step's rows: an object for one row, and columns that read as such objects for many."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from tandem.engine.steps.seeded import start_of, uniforms
from tandem.protocol.messages import SamplingParams

SETTINGS = 8
"""Columns of `SamplingMetadata.settings`."""
TEMPERATURE, NUMBER = 0, 4
"""Two of them; the second is left free for the drawn number."""
NO_TOKEN = -1
"""The id that is drawn for a row whose largest logit is not finite: NaN, infinite, or no token was left to draw.

A step that is launched before the host has read it takes token 0 in its place.
"""


@dataclass(slots=True, eq=False, weakref_slot=True)
class History:
    """The tokens that penalties and grammars look back on; the half that runs a request keeps one for all its draws.

    `answer` holds the tokens that are here: one fewer where the row's own token is still in flight (`StepRow.source`).
    It grows between steps; engines read it while a step is launched. An engine may keep what it counted of a history
    for the next draw: it is not told when the request ends.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    may_wait: bool = False
    """True if the half can discard a draw, and repeat its row in the next step, where `waiting` is set."""
    waiting: bool = False
    """Set by the engine with each draw: the grammar's mask was not ready, so that the token is to be discarded."""
    slow: bool = False
    """Set by the engine once a mask took more time than a step waits: the answer gets no drafts from then on."""
    failure: Exception | None = None
    """Set by the engine if the grammar can go on no more: the request fails when it gets its next token."""


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """Sample the token that follows the row's last one.

    `index` is the number of this draw in the request's seeded sequence (0 for the first token of the answer), so
    that any worker, in any batch, draws the same number. `history` is there if `sampling.needs_history`, else None.
    """

    sampling: SamplingParams
    index: int
    history: History | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMetadata(Sequence[SamplingInput]):
    """The sampling inputs of n rows as columns. Its arrays must not change while a step that has it may run."""

    samplings: Sequence[SamplingParams]
    histories: Sequence[History | None]
    settings: NDArray[np.float64]
    """[n, SETTINGS], see `settings_of`."""
    starts: NDArray[np.uint64]
    """[n], of the seeds: `seeded.start_of`."""
    indices: NDArray[np.int64]
    """[n]"""
    greedy: bool
    """True if no draw is random."""
    looks_back: bool
    """True if any draw has a history: penalties, or a grammar."""
    scored: bool
    """True if any draw wants log probabilities."""
    masked: bool = False
    """True if any draw has changed logits: a bias, or ends that come too early (`tandem/engine/logits_mask.py`)."""

    @classmethod
    def of(cls, draws: Sequence[SamplingInput]) -> "SamplingMetadata":
        """The same as columns; made of columns already, itself."""
        if isinstance(draws, SamplingMetadata):
            return draws
        samplings = [draw.sampling for draw in draws]
        histories = [draw.history for draw in draws]
        settings = np.array([settings_of(each) for each in samplings], dtype=np.float64).reshape(-1, SETTINGS)
        return cls(
            samplings,
            histories,
            settings,
            np.array([start_of(each.seed) for each in samplings], dtype=np.uint64),
            np.array([draw.index for draw in draws], dtype=np.int64),
            all_greedy(settings),
            any(history is not None for history in histories),
            any(each.logprobs is not None for each in samplings),
            any(draw.index < draw.sampling.masked_tokens for draw in draws),
        )

    @property
    def constrained(self) -> bool:
        """True if any answer follows a grammar."""
        return self.looks_back and any(each.grammar for each in self.samplings)

    def numbers(self) -> NDArray[np.float64]:
        """[n] in [0, 1): each draw's number, 0 for greedy ones."""
        return np.where(self.settings[:, TEMPERATURE] > 0, uniforms(self.starts, self.indices), 0.0)

    def followed_by(self, others: Sequence[SamplingInput]) -> "SamplingMetadata":
        """And `others` behind them."""
        if not others:
            return self
        more = SamplingMetadata.of(others)
        return SamplingMetadata(
            [*self.samplings, *more.samplings],
            [*self.histories, *more.histories],
            np.concatenate((self.settings, more.settings)),
            np.concatenate((self.starts, more.starts)),
            np.concatenate((self.indices, more.indices)),
            self.greedy and more.greedy,
            self.looks_back or more.looks_back,
            self.scored or more.scored,
            self.masked or more.masked,
        )

    def __len__(self) -> int:
        return len(self.samplings)

    @overload
    def __getitem__(self, at: int) -> SamplingInput: ...
    @overload
    def __getitem__(self, at: slice) -> "SamplingMetadata": ...
    def __getitem__(self, at: int | slice) -> "SamplingInput | SamplingMetadata":
        if isinstance(at, slice):
            return SamplingMetadata(
                self.samplings[at],
                self.histories[at],
                self.settings[at],
                self.starts[at],
                self.indices[at],
                all_greedy(self.settings[at]),
                self.looks_back,
                self.scored,
                self.masked,
            )
        return SamplingInput(self.samplings[at], int(self.indices[at]), self.histories[at])


def all_greedy(settings: NDArray[np.float64]) -> bool:
    """Return True if none of these `SamplingMetadata.settings` is random."""
    return not settings[:, TEMPERATURE].any()


def settings_of(sampling: SamplingParams) -> tuple[float, ...]:
    """Return a row of `SamplingMetadata.settings`.

    It is temperature, top_k, top_p, min_p, space for the drawn number, and the repetition, presence and frequency
    penalties.
    """
    return (
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        0.0,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )
