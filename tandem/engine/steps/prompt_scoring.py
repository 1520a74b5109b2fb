"""Prompt scoring: computes log probabilities of a prompt's tokens in the steps that store the prompt's KV.

The logits at a position give the probability of the prompt's next token. The logits of at most `PIECE` positions are in
memory at the same time, because those of a long prompt would need more memory than the model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.protocol.messages import PromptLogprobs

PIECE = 64
"""Maximum number of positions whose logits are in memory at the same time."""

Logprobs = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""A function that computes log probabilities as `tandem.engine.logprobs.logprobs` does.

Its arguments are logits [n, vocab], tokens [n] int64 and the number of alternatives per token.
"""


@dataclass(slots=True, eq=False)
class PromptScores:
    """The log probabilities of a prompt's tokens, for the chunks computed so far.

    Owned by the request. The engine appends to it when the result of a step is read.
    """

    token_ids: Sequence[int]
    """The token ids of the whole prompt."""
    top_count: int
    """The number of most likely tokens that are reported at each position."""
    chosen: list[float] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    top: list[float] = field(default_factory=list)
    finite: bool = True
    """False once the log probability of any token was not finite."""

    def result(self) -> PromptLogprobs:
        """Return the log probabilities so far as a message for the router."""
        return PromptLogprobs(tuple(self.chosen), self.top_count, tuple(self.top_ids), tuple(self.top))

    def next_tokens(self, start: int, count: int) -> Sequence[int]:
        """Return the token after each of the `count` positions from `start`; the prompt's last position has none."""
        return self.token_ids[start + 1 : start + count + 1]

    def take(self, values: Tensor, ids: Tensor) -> None:
        """Append the log probabilities of a chunk, as `Logprobs` returns them.

        `values` is [n, 1 + most], `ids` [n, most]; both are on the host.
        """
        self.finite &= bool(values[:, 0].isfinite().all())
        top = min(self.top_count, ids.shape[1])
        self.chosen += values[:, 0].tolist()
        self.top_ids += ids[:, :top].flatten().tolist()
        self.top += values[:, 1 : 1 + top].flatten().tolist()


class StepPieces:
    """The scored positions of a step, divided into pieces whose logits are computed one after the other.

    In the step's hidden states, the scored positions follow the rows that sample a token. An instance of this class
    only computes the logits, for a rank that has no requests; `StepScoring` computes log probabilities from the logits.
    """

    def __init__(self, drawn: int, scored: int) -> None:
        """Create the pieces of a step with `drawn` rows that sample a token and `scored` scored positions."""
        self.drawn, self.scored = drawn, scored

    def pieces(self) -> Iterator[slice]:
        """Yield the pieces as ranges of at most `PIECE` positions, counted from the first scored position."""
        for first in range(0, self.scored, PIECE):
            yield slice(first, min(first + PIECE, self.scored))

    def logits(self, hidden: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Compute all logits, and return the logits of the rows that sample a token; None if no row samples one.

        The logits of scored positions are computed piece by piece and dropped, because this rank only has to take part
        in the communication from which the first rank gets them. The arguments are those of `StepScoring.logits`.
        """
        scored = hidden[self.drawn :]
        for piece in self.pieces():
            project(scored[piece])
        return project(hidden[: self.drawn]) if self.drawn else None

    def deliver(self) -> None:
        """Do nothing, because this rank computes no log probabilities."""


class StepScoring(StepPieces):
    """The prompt scoring of one step.

    In the step's hidden states, the scored positions follow the rows that sample a token.
    """

    def __init__(
        self, rows: Sequence[tuple[PromptScores, Sequence[int]]], targets: Tensor, drawn: int, logprobs: Logprobs
    ) -> None:
        """Prepare the scoring of `rows`: scored chunks, each with the tokens whose log probabilities are computed.

        `targets` [scored] int64 has the tokens of all chunks. `drawn` is the number of rows that sample a token.
        """
        super().__init__(drawn, len(targets))
        self._rows = rows
        self._targets = targets
        self._logprobs = logprobs
        self._top = max(scores.top_count for scores, _ in rows)
        self._read: list[tuple[Tensor, Tensor]] = []

    def logits(self, hidden: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Score the prompt positions, and return the logits [D, vocab] of the rows that sample a token; None if D = 0.

        `hidden` is [D + scored, width]; the states of the D sampling rows come first. `project` computes logits from
        hidden states. The call only launches kernels and never waits for the device.
        """
        scored, targets = hidden[self.drawn :], self._targets
        scores = [self._logprobs(project(scored[piece]), targets[piece], self._top) for piece in self.pieces()]
        self._read = [(_to_host(values), _to_host(ids)) for values, ids in scores]
        return project(hidden[: self.drawn]) if self.drawn else None

    def deliver(self) -> None:
        """Append the log probabilities to the `PromptScores` of each request, once the step has run."""
        if not self._read:
            return
        values, ids = (torch.cat(parts) for parts in zip(*self._read, strict=True))
        first = 0
        for scores, tokens in self._rows:
            some = slice(first, first + len(tokens))
            scores.take(values[some], ids[some])
            first = some.stop


def _to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory; it is complete once the device has run all work launched so far."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
