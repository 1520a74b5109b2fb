"""Drafts of an EAGLE head, from the hidden states that the engine's newest step left.

The head's context are the tokens of the answer whose hidden states were here when a draft was computed: those of a
prompt, and of steps without drafts, are missing. Positions count the tokens of the context alone, as far as they are
there, so that its KV has no gaps.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.kernels.reference import rms_norm
from tandem.engine.speculation.draft_model import DraftModel
from tandem.engine.speculation.eagle.runner import EagleRunner
from tandem.engine.speculation.proposer import DRAFTS_MAX, DraftSource, ProposerName, WantedDraft
from tandem.engine.steps.sampling_metadata import SamplingInput


class TargetStates(NamedTuple):
    """The hidden states of the model that verifies drafts."""

    drawn: Tensor
    """See `HiddenStateModel.drawn_hidden`."""
    norm: Tensor
    """[H], the final norm."""
    eps: float


class EagleProposer(DraftModel):
    """A draft model whose context are hidden states: `_Request.tokens` are the context and what was drawn since.

    Where another step or worker drew the newest token there is no hidden state, and the request's next step has no
    draft. Drafts add nothing to the context: once they are verified, it gets the model's own states instead.
    """

    source = DraftSource(ProposerName.EAGLE)

    def __init__(
        self, runner: EagleRunner, target: TargetStates, memory: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """`memory`: see `BatchProposer`."""
        super().__init__(runner, memory)
        self._head = runner
        self._target = target
        self._states = target.drawn
        """The states that the tokens of the next step are drawn from, those of a request at `_rows`."""
        self._rows: dict[Hashable, Sequence[int]] = {}

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """See `Proposer`; the context is empty."""
        super().begin(key, token_ids[-DRAFTS_MAX - 1 :], cache_salt)

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """See `Proposer`; a step draws at most one token more than drafts, and older ones have no state any more."""
        super().extend(key, token_ids)
        request = self._requests[key]
        del request.tokens[request.stored : -DRAFTS_MAX - 1]

    def missing_at_first(self, tokens: int) -> int:
        """See `BatchProposer`: what came before is not computed."""
        return min(tokens, DRAFTS_MAX + 1)

    def room(self, key: Hashable, drafts: int) -> int:
        """See `BatchProposer`; a context that is as long as the head's begins anew."""
        request = self._requests[key]
        if len(request.tokens) + drafts > self._head.facts.max_context:
            del request.tokens[: -self.missing(key)]
            request.stored = 0
        return super().room(key, drafts)

    def compute(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        """See `BatchProposer`."""
        known = [each for each in wanted if each.rows and max(each.rows) < len(self._target.drawn)]
        if not known:
            return [()] * len(wanted)
        rows: list[int] = []
        for each in known:
            request = self._requests[each.key]
            # The tokens of steps between this one and the last draft have no states: the context goes on without them.
            del request.tokens[request.stored : -len(each.rows)]
            first = len(rows)
            rows += each.rows[-self.missing(each.key) :]
            self._rows[each.key] = range(first, len(rows))
        with torch.inference_mode():
            drawn = self._target.drawn[torch.tensor(rows, device=self._target.drawn.device)]
            self._states = rms_norm(drawn, self._target.norm, self._target.eps)
        found = dict(zip((each.key for each in known), super().compute(known), strict=True))
        for key in found:
            request = self._requests[key]
            request.stored, request.drafted = len(request.tokens), ()
        return [found.get(each.key, ()) for each in wanted]

    def _own_draws(self, draws: Sequence[SamplingInput]) -> Sequence[SamplingInput]:
        """See `DraftModel`; the head follows no grammar."""
        sampling = replace(draws[0].sampling, grammar="")
        return [SamplingInput(sampling, each.index) for each in draws]

    def _draw(
        self, fed: Mapping[Hashable, Sequence[tuple[int, int]]], draws: Mapping[Hashable, SamplingInput]
    ) -> dict[Hashable, int]:
        """See `DraftModel`; the tokens come with their states, and leave those of the next ones."""
        with torch.inference_mode():
            rows = [row for key in fed for row in self._rows[key]]
            self._head.give(self._states[torch.tensor(rows, device=self._states.device)])
        drawn = super()._draw(fed, draws)
        self._states = self._head.drawn_hidden
        ends = accumulate(map(len, fed.values()))
        self._rows = {key: [end - 1] for key, end in zip(fed, ends, strict=True)}
        return drawn
