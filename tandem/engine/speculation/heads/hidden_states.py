"""A model that keeps the hidden states of rows that sample a token, from which heads predict the following tokens."""

from typing import Any

import torch
from torch import Tensor

from tandem.engine.config import EngineConfig
from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.base import Kernels
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.parameters import Parameters
from tandem.engine.parallel.rank_model import RankModel


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
        **others: Any,
    ) -> None:
        """Prepare the model, and allocate the hidden states of up to `rows` sampling rows of a step.

        `others` are the keyword arguments of `DecoderModel` or `RankModel`.
        """
        super().__init__(spec, parameters, kernels, max_context, **others)
        device = parameters.embedding.device
        self.drawn_hidden = torch.zeros(rows, spec.hidden_size, dtype=parameters.dtype, device=device)
        """[rows, H]: the residual stream before the final norm, for each sampling row of the newest step that has any.

        The next step with sampling rows overwrites it.
        """

    def _logits(self, hidden: Tensor) -> Tensor:
        self._keep(hidden)
        return super()._logits(hidden)

    def _keep(self, hidden: Tensor) -> None:
        kept = hidden[: len(self.drawn_hidden)]
        self.drawn_hidden[: len(kept)] = kept


class HiddenStateRankModel(HiddenStateModel, RankModel):
    """The first rank's part of a model, with the hidden states of sampling rows, which are equal on all ranks."""
