"""The decoder model of one rank of a group."""

from torch import Tensor

from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.base import DeferredTokens, Kernels
from tandem.engine.kernels.lora.adapted_products import AdaptedProducts
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.parameters import Parameters
from tandem.engine.parallel.collectives import Collectives
from tandem.engine.parallel.rank_products import RankProducts


class RankModel(DecoderModel):
    """One rank's part of a decoder model.

    Only the first rank embeds the tokens and gets the logits. The other ranks receive the embeddings from it, and their
    `forward` returns logits without rows, or None as in `DecoderModel`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Parameters,
        kernels: Kernels,
        max_context: int,
        *,
        collectives: Collectives,
        adapted: AdaptedProducts | None = None,
    ) -> None:
        """Prepare this rank's weights for `kernels`; `spec` is the result of `rank_spec`."""
        self._collectives = collectives
        super().__init__(spec, parameters, kernels, max_context, adapted=adapted)

    def _layer_products(self, kernels: Kernels, adapted: AdaptedProducts | None) -> RankProducts:
        return RankProducts(super()._layer_products(kernels, adapted), self._collectives)

    def _embed(self, token_ids: Tensor, feed: DeferredTokens | None) -> Tensor:
        if self._collectives.rank.leads:
            hidden = super()._embed(token_ids, feed)
        else:
            hidden = self._final_norm.weight.new_empty(len(token_ids), self.spec.hidden_size, dtype=self.dtype)
        self._collectives.broadcast(hidden)
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._collectives.gather_columns(super()._logits(hidden), self.spec.vocab_size)
