"""A model that keeps the hidden states of the rows that sample tokens, for heads that guess the following tokens."""

import torch
from torch import Tensor

from tandem.engine.config import EngineConfig
from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.lora.adapted_products import AdaptedProducts
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.parameters import Parameters


def hidden_rows(config: EngineConfig) -> int:
    """Return the most rows of a step that sample a token: a step of prompts may have as many rows as tokens."""
    return max(config.max_batch_requests, config.max_step_tokens)


class HiddenStateModel(DecoderModel):
    """A `DecoderModel` whose steps, those of CUDA graphs included, also leave their hidden states in a buffer."""

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Parameters,
        kernels: Kernels,
        max_context: int,
        rows: int,
        *,
        adapted: AdaptedProducts | None = None,
    ) -> None:
        """Take `rows`, the number of a step's sampling rows whose hidden states are kept."""
        super().__init__(spec, parameters, kernels, max_context, adapted=adapted)
        device = parameters.embedding.device
        self.drawn_hidden = torch.zeros(rows, spec.hidden_size, dtype=parameters.dtype, device=device)
        """[rows, H]: the residual stream before the final norm, for each sampling row of the newest step that had any.

        The next step overwrites it.
        """

    def _logits(self, hidden: Tensor) -> Tensor:
        self._keep(hidden)
        return super()._logits(hidden)

    def _keep(self, hidden: Tensor) -> None:
        kept = hidden[: len(self.drawn_hidden)]
        self.drawn_hidden[: len(kept)] = kept
