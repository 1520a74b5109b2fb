"""The sampler's input: an object for one row, or columns for many rows, which can be read like a list of objects."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from tandem.engine.steps.seeded import start_of, uniforms
from tandem.protocol.messages import SamplingParams

SETTINGS = 8
"""The number of columns in `SamplingMetadata.settings`."""
TEMPERATURE, NUMBER = 0, 4
"""The columns of the temperature and of the random number, which the sampler fills in."""
NO_TOKEN = -1
"""The token id of a row whose largest logit is not finite, for example because no token was allowed.

If the next step was launched before the host has read this id, it uses token 0 instead.
"""


@dataclass(slots=True, eq=False, weakref_slot=True)
class History:
    """The tokens of a request, as penalties and grammars need them.

    The scheduler keeps one history for all sampling inputs of the request. `answer` has the output tokens that the host
    knows: one token fewer than the output if the row's own token is still in flight (`StepRow.source`). It grows
    between steps; the engine reads it while a step is launched. The engine may cache token counts of a history between
    steps, and is not notified when the request ends.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    may_wait: bool = False
    """True if the scheduler can discard a token sampled while `waiting` is set, and repeat the row in the next step."""
    waiting: bool = False
    """Set by the engine in each step: True if the grammar's mask was not ready, so the token must be discarded."""
    slow: bool = False
    """Set by the engine once a mask took longer than a step waits; from then on the request gets no draft tokens."""
    failure: Exception | None = None
    """Set by the engine if the grammar cannot continue; the request fails when it gets its next token."""


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """The parameters for sampling the token that follows the last token of a row.

    `index` is the index of the token in the request's output, 0 for the first one; it selects the random number in the
    seeded sequence, so any worker samples the same token in any batch. `history` is set if `sampling.needs_history`,
    else None.
    """

    sampling: SamplingParams
    index: int
    history: History | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMetadata(Sequence[SamplingInput]):
    """The sampling inputs of n rows, as columns.

    The arrays must not change while a step that uses them may run.
    """

    samplings: Sequence[SamplingParams]
    histories: Sequence[History | None]
    settings: NDArray[np.float64]
    """[n, SETTINGS]: the columns of `settings_of`."""
    starts: NDArray[np.uint64]
    """[n]: the start of the random sequence of each row's seed, see `seeded.start_of`."""
    indices: NDArray[np.int64]
    """[n]: the `index` of each sampling input."""
    greedy: bool
    """True if all rows sample greedily."""
    looks_back: bool
    """True if any row has a history, because of penalties or a grammar."""
    scored: bool
    """True if any row wants log probabilities."""
    masked: bool = False
    """True if any row's logits are changed: by a bias, or to prevent an early end (`tandem/engine/logits_mask.py`)."""

    @classmethod
    def of(cls, draws: Sequence[SamplingInput]) -> "SamplingMetadata":
        """Return these sampling inputs as columns; if they are columns already, return them unchanged."""
        if isinstance(draws, SamplingMetadata):
            return draws
        samplings = [sampling_input.sampling for sampling_input in draws]
        histories = [sampling_input.history for sampling_input in draws]
        settings = np.array([settings_of(sampling) for sampling in samplings], dtype=np.float64).reshape(-1, SETTINGS)
        return cls(
            samplings,
            histories,
            settings,
            np.array([start_of(sampling.seed) for sampling in samplings], dtype=np.uint64),
            np.array([sampling_input.index for sampling_input in draws], dtype=np.int64),
            all_greedy(settings),
            any(history is not None for history in histories),
            any(sampling.logprobs is not None for sampling in samplings),
            any(sampling_input.index < sampling_input.sampling.masked_tokens for sampling_input in draws),
        )

    @property
    def constrained(self) -> bool:
        """True if the output of any row follows a grammar."""
        return self.looks_back and any(sampling.grammar for sampling in self.samplings)

    def numbers(self) -> NDArray[np.float64]:
        """Return the random number of each row: [n] in [0, 1), 0 for greedy rows."""
        return np.where(self.settings[:, TEMPERATURE] > 0, uniforms(self.starts, self.indices), 0.0)

    def followed_by(self, others: Sequence[SamplingInput]) -> "SamplingMetadata":
        """Return the concatenation of these sampling inputs and `others`."""
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
    """Return True if all rows of `settings`, which are those of `SamplingMetadata.settings`, sample greedily."""
    return not settings[:, TEMPERATURE].any()


def settings_of(sampling: SamplingParams) -> tuple[float, ...]:
    """Return a request's row of `SamplingMetadata.settings`.

    Its columns are temperature, top_k, top_p, min_p, space for the random number, and the repetition, presence and
    frequency penalties.
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
