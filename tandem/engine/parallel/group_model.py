"""What the models of a group's ranks have in common: one rank embeds the tokens."""

from torch import Tensor

from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.base import DeferredTokens, Kernels
from tandem.engine.kernels.lora.adapted_products import AdaptedProducts
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.parameters import Parameters
from tandem.engine.parallel.collectives import Collectives


class GroupModel(DecoderModel):
    """A decoder model on one rank of a group.

    The first rank of the first stage embeds the tokens, because only its device knows those of `DeferredTokens`. It
    broadcasts the embeddings to the other ranks of its stage; a later stage receives hidden states instead.
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
        """Prepare the weights for `kernels`, as `DecoderModel` does; `collectives` exchanges with the other ranks."""
        self._collectives, self._rank = collectives, collectives.rank
        super().__init__(spec, parameters, kernels, max_context, adapted=adapted)

    def _embed(self, token_ids: Tensor, feed: DeferredTokens | None) -> Tensor:
        if self._rank.embeds:
            hidden = super()._embed(token_ids, feed)
        else:
            hidden = self._final_norm.weight.new_empty(len(token_ids), self.spec.hidden_size, dtype=self.dtype)
        if self._rank.stage > 0:
            self._collectives.receive(hidden)
        elif self._rank.count > 1:
            self._collectives.broadcast(hidden)
        return hidden
