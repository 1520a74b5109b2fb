"""The proposer of an EAGLE head or an MTP layer, from the hidden states of the engine's newest step.

The head's context consists of the output tokens whose hidden states were available when a draft was computed. The
tokens of the prompt, and of steps without drafts, are missing from it. Positions count the tokens of this context only,
so that the KV has no gaps.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor

from tandem.engine.speculation.draft_model import DraftModel
from tandem.engine.speculation.eagle.runner import EagleRunner
from tandem.engine.speculation.proposer import DRAFTS_MAX, DraftSource, ProposerName, WantedDraft
from tandem.engine.steps.sampling_metadata import SamplingInput


class EagleProposer(DraftModel):
    """A draft model whose input includes hidden states of the target model.

    `_Request.tokens` are the head's context, followed by the tokens sampled since the last draft. If another step or
    worker sampled the newest token, its hidden state is missing, and the request gets no draft in the next step. The
    KV of accepted draft tokens is computed again, from the target's own hidden states.
    """

    def __init__(
        self,
        runner: EagleRunner,
        drawn_hidden: Tensor,
        memory: Mapping[str, int] = MappingProxyType({}),
        name: ProposerName = ProposerName.EAGLE,
    ) -> None:
        """Create a proposer that runs the head with `runner`; `name` is the name of its source.

        It reads the hidden states of the target model from `drawn_hidden`, the buffer of `HiddenStateModel`. `memory`
        is the memory in bytes of the `weights` and of the `kv` pages, as in `BatchProposer.memory`.
        """
        super().__init__(runner, memory)
        self.source = DraftSource(name)
        self._head = runner
        self._target = drawn_hidden
        self._states = drawn_hidden
        """The hidden states that the next step's tokens were sampled from; `_rows` has the row numbers by request."""
        self._rows: dict[Hashable, Sequence[int]] = {}

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """Add a request, as `Proposer.begin` describes; its context is empty."""
        super().begin(key, token_ids[-DRAFTS_MAX - 1 :], cache_salt)

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """Append tokens, as `Proposer.extend` describes.

        Of the tokens whose KV is not stored, only the newest DRAFTS_MAX + 1 are kept. A step samples no more tokens of
        a request, and the hidden states of tokens from earlier steps no longer exist.
        """
        super().extend(key, token_ids)
        request = self._requests[key]
        del request.tokens[request.stored : -DRAFTS_MAX - 1]

    def missing_at_first(self, tokens: int) -> int:
        """Return the value of `missing` right after a request begins: `begin` keeps at most DRAFTS_MAX + 1 tokens."""
        return min(tokens, DRAFTS_MAX + 1)

    def capacity(self, key: Hashable, drafts: int) -> int:
        """Return how many of `drafts` draft tokens fit into memory.

        If the context has reached the head's maximum length, a new one is started.
        """
        request = self._requests[key]
        if len(request.tokens) + drafts > self._head.facts.max_context:
            del request.tokens[: -self.missing(key)]
            request.stored = 0
        return super().capacity(key, drafts)

    def compute(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        """Return the draft tokens of each request; none if the hidden state of its newest token is missing."""
        known = [draft for draft in wanted if draft.rows and max(draft.rows) < len(self._target)]
        if not known:
            return [()] * len(wanted)
        rows: list[int] = []
        for draft in known:
            request = self._requests[draft.key]
            # Tokens of steps between the last draft and this one have no hidden states: the context continues without
            # them.
            del request.tokens[request.stored : -len(draft.rows)]
            first = len(rows)
            rows += draft.rows[-self.missing(draft.key) :]
            self._rows[draft.key] = range(first, len(rows))
        with torch.inference_mode():
            drawn = self._target[torch.tensor(rows, device=self._target.device)]
            self._states = self._head.from_target(drawn)
        drafts = dict(zip((draft.key for draft in known), super().compute(known), strict=True))
        for key in drafts:
            request = self._requests[key]
            request.stored, request.drafted = len(request.tokens), ()
        return [drafts.get(draft.key, ()) for draft in wanted]

    def _own_draws(self, draws: Sequence[SamplingInput]) -> Sequence[SamplingInput]:
        """Return the sampling inputs without grammar and token history.

        So the EAGLE head samples its draft tokens without grammar masks and without penalties.
        """
        sampling = replace(draws[0].sampling, grammar="")
        return [SamplingInput(sampling, sampling_input.index) for sampling_input in draws]

    def _draw(
        self, fed: Mapping[Hashable, Sequence[tuple[int, int]]], draws: Mapping[Hashable, SamplingInput]
    ) -> dict[Hashable, int]:
        """Run the head on tokens with their hidden states; its outputs become the hidden states of the next tokens."""
        with torch.inference_mode():
            rows = [row for key in fed for row in self._rows[key]]
            self._head.give(self._states[torch.tensor(rows, device=self._states.device)])
        drawn = super()._draw(fed, draws)
        self._states = self._head.drawn_hidden
        ends = accumulate(map(len, fed.values()))
        self._rows = {key: [end - 1] for key, end in zip(fed, ends, strict=True)}
        return drawn
