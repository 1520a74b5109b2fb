"""A model that keeps the hidden states of rows that sample a token, from which heads predict the following tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.engine.config import EngineConfig
from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.base import DeferredTokens, Kernels, StepLayout
from tandem.engine.kernels.kv_cache import GroupCache
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.parameters import Parameters
from tandem.engine.parallel.rank_model import RankModel
from tandem.engine.steps.prompt_scoring import StepPieces


def hidden_rows(config: EngineConfig) -> int:
    """Return the maximum number of rows of a step that sample a token, `max(max_batch_requests, max_step_tokens)`.

    A step of one-token prompts has `max_step_tokens` rows that sample a token.
    """
    return max(config.batch_requests, config.max_step_tokens)


class HiddenStateModel(DecoderModel):
    """A `DecoderModel` whose steps, including those of CUDA graphs, also store hidden states in a buffer."""

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Parameters,
        kernels: Kernels,
        max_context: int,
        rows: int,
        *,
        before: Sequence[int] = (),
        **others: Any,
    ) -> None:
        """Prepare the model, and allocate the hidden states of up to `rows` sampling rows of a step.

        `before` are the numbers of the layers, different and from 1 on, whose inputs are kept; empty = the output of
        the last layer is kept. `others` are the keyword arguments of `DecoderModel` or `RankModel`.
        """
        super().__init__(spec, parameters, kernels, max_context, **others)
        hidden, device = spec.hidden_size, parameters.embedding.device
        self.drawn_hidden = torch.zeros(rows, max(len(before), 1) * hidden, dtype=parameters.dtype, device=device)
        """[rows, H], for each sampling row of the newest step that has any: the residual stream before the final norm.

        With `before`, [rows, len(before)·H]: the residual streams before these layers, concatenated. The next step with
        sampling rows overwrites it.
        """
        self._columns = {layer: slice(n * hidden, (n + 1) * hidden) for n, layer in enumerate(before)}
        self._drawn: Tensor | None = None
        """The indices of the step's sampling tokens, see `forward`."""

    def forward(
        self,
        token_ids: Tensor,
        layouts: Sequence[StepLayout],
        caches: Sequence[GroupCache],
        drawn: Tensor | None,
        feed: DeferredTokens | None = None,
        *,
        scoring: StepPieces | None = None,
    ) -> Tensor | None:
        """Run a step as `DecoderModel.forward` does, and store the hidden states of the rows in `drawn`."""
        self._drawn = drawn
        return super().forward(token_ids, layouts, caches, drawn, feed, scoring=scoring)

    def run_layer(
        self,
        number: int,
        hidden: Tensor,
        layouts: Sequence[StepLayout],
        caches: Sequence[GroupCache],
        embedding: Tensor | None = None,
    ) -> None:
        """Run layer `number`, and store its output if the input of the next layer is kept."""
        super().run_layer(number, hidden, layouts, caches, embedding)
        columns = self._columns.get(number + 1)
        if columns is not None:
            rows = len(self.drawn_hidden)
            kept = hidden[:rows] if self._drawn is None else hidden[self._drawn[:rows]]
            self.drawn_hidden[: len(kept), columns] = kept

    def _logits(self, hidden: Tensor) -> Tensor:
        if not self._columns:
            self._keep(hidden)
        return super()._logits(hidden)

    def _keep(self, hidden: Tensor) -> None:
        kept = hidden[: len(self.drawn_hidden)]
        self.drawn_hidden[: len(kept)] = kept


class HiddenStateRankModel(HiddenStateModel, RankModel):
    """The first rank's part of a model, with the hidden states of sampling rows, which are equal on all ranks."""
