"""Scoring of prompts: log probabilities of a prompt's tokens, computed in the steps that store its KV.

The logits at a position give the probability of the prompt's next token. Logits exist for only `PIECE` positions at a
time, because those of a long prompt would need more memory than the model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.protocol.messages import PromptLogprobs

PIECE = 64
"""The number of positions whose logits exist at the same time."""

Logprobs = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""A function like `tandem.engine.logprobs.logprobs`.

It takes logits [n, vocab], tokens [n] int64 and a number of alternatives.
"""


@dataclass(slots=True, eq=False)
class PromptScores:
    """The log probabilities of one prompt, for the chunks computed so far.

    The request that wants them owns this object. The engine appends to it when the result of a step is read.
    """

    token_ids: Sequence[int]
    """The whole prompt."""
    top_count: int
    """The number of alternatives at each position."""
    chosen: list[float] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    top: list[float] = field(default_factory=list)
    finite: bool = True
    """False once the logits at any position were not finite."""

    def result(self) -> PromptLogprobs:
        """Return the log probabilities so far, as they are sent to the router."""
        return PromptLogprobs(tuple(self.chosen), self.top_count, tuple(self.top_ids), tuple(self.top))

    def next_tokens(self, start: int, count: int) -> Sequence[int]:
        """Return the tokens after those at `start`, `start + 1`, …: `count` of them, one fewer at the prompt's end."""
        return self.token_ids[start + 1 : start + count + 1]

    def take(self, values: Tensor, ids: Tensor) -> None:
        """Append the scores of a chunk: values [n, 1 + most] and ids [n, most] on the host, as `Logprobs` returns."""
        self.finite &= bool(values[:, 0].isfinite().all())
        top = min(self.top_count, ids.shape[1])
        self.chosen += values[:, 0].tolist()
        self.top_ids += ids[:, :top].flatten().tolist()
        self.top += values[:, 1 : 1 + top].flatten().tolist()


class StepPieces:
    """The hidden states of a step that scores prompts: first those of the draws, then those of the scored positions."""

    def __init__(self, drawn: int, scored: int) -> None:
        """Create the pieces of a step with `drawn` draws and `scored` scored positions."""
        self.drawn, self.scored = drawn, scored

    def pieces(self) -> Iterator[slice]:
        """Yield the ranges of the scored positions whose logits exist at the same time."""
        for first in range(0, self.scored, PIECE):
            yield slice(first, min(first + PIECE, self.scored))

    def logits(self, hidden: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Compute the logits piece by piece, without scores: what a rank that has no requests contributes."""
        scored = hidden[self.drawn :]
        for piece in self.pieces():
            project(scored[piece])
        return project(hidden[: self.drawn]) if self.drawn else None

    def deliver(self) -> None:
        """Do nothing, because nothing is scored here."""


class StepScoring(StepPieces):
    """The scoring of prompts in one step."""

    def __init__(
        self, rows: Sequence[tuple[PromptScores, Sequence[int]]], targets: Tensor, drawn: int, logprobs: Logprobs
    ) -> None:
        """Take the scored chunks, `rows`, each with the tokens it scores; targets [scored] int64 has all these tokens.

        `drawn` is the number of draws of the step.
        """
        super().__init__(drawn, len(targets))
        self._rows = rows
        self._targets = targets
        self._logprobs = logprobs
        self._top = max(scores.top_count for scores, _ in rows)
        self._read: list[tuple[Tensor, Tensor]] = []

    def logits(self, hidden: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Score hidden states and return the logits of the draws [D, vocab], None without draws.

        The hidden states are [D + scored, width]; those of the draws come first.

        `project` computes logits from hidden states. It only launches kernels and never waits for a device.
        """
        scored, targets = hidden[self.drawn :], self._targets
        found = [self._logprobs(project(scored[piece]), targets[piece], self._top) for piece in self.pieces()]
        self._read = [(_to_host(values), _to_host(ids)) for values, ids in found]
        return project(hidden[: self.drawn]) if self.drawn else None

    def deliver(self) -> None:
        """Append the scores to the `PromptScores` of each request, once the step has run."""
        if not self._read:
            return
        values, ids = (torch.cat(parts) for parts in zip(*self._read, strict=True))
        first = 0
        for scores, tokens in self._rows:
            some = slice(first, first + len(tokens))
            scores.take(values[some], ids[some])
            first = some.stop


def _to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host, which is complete once the device has run everything that was launched so far."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
