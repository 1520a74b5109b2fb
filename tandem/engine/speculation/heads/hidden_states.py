"""A model that keeps the hidden states of the rows that drew tokens, for heads that guess the tokens behind them."""

import torch
from torch import Tensor

from tandem.engine.config import EngineConfig
from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.lora.adapted_products import AdaptedProducts
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.parameters import Parameters


def hidden_rows(config: EngineConfig) -> int:
    """Return the most rows that a step draws from: with prompts, as many as it has tokens."""
    return max(config.max_batch_requests, config.max_step_tokens)


class HiddenStateModel(DecoderModel):
    """Computes the same as `DecoderModel`; each step also leaves its hidden states, CUDA graphs included."""

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
        """`rows`: the most drawn rows of a step of which any is kept."""
        super().__init__(spec, parameters, kernels, max_context, adapted=adapted)
        device = parameters.embedding.device
        self.drawn_hidden = torch.zeros(rows, spec.hidden_size, dtype=parameters.dtype, device=device)
        """[rows, H]: the residual stream before the final norm, by the drawn row of the newest step that drew any.

        The next step overwrites it.
        """

    def _logits(self, hidden: Tensor) -> Tensor:
        self._keep(hidden)
        return super()._logits(hidden)

    def _keep(self, hidden: Tensor) -> None:
        kept = hidden[: len(self.drawn_hidden)]
        self.drawn_hidden[: len(kept)] = kept
