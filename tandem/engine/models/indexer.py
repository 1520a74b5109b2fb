"""The indexer of a layer with sparse attention, which chooses the tokens that each token attends to."""

import threading

from torch import Tensor

from tandem.engine.kernels.base import Kernels, Products, StepLayout
from tandem.engine.kernels.layers import IndexQueries, LatentLayer, Linear, Norm
from tandem.engine.models.parameters import IndexerParameters


class Indexer:
    """The indexer of one layer (`IndexShape`), with weights prepared for the kernels.

    Its only state is the last choice, which later layers may share. It is kept for each thread, as several threads may
    compute trial steps at the same time.
    """

    def __init__(
        self, weights: IndexerParameters, norm: Norm, query_norm: Norm, *, kernels: Kernels, products: Products
    ) -> None:
        """Prepare the weights; `norm` is the norm of the layer's input, `query_norm` that of the query latent."""
        self._kernels, self._products = kernels, products
        self._norm, self._query_norm = norm, query_norm
        self._key = products.prepare(Linear(weights.index_key))
        self._head_weights = products.prepare(Linear(weights.head_weights))
        self._query_up = products.prepare(Linear(weights.query_up))
        self._chosen = threading.local()

    def store(
        self, hidden: Tensor, query_latent: Tensor, layer: LatentLayer, cache: Tensor, layout: StepLayout
    ) -> IndexQueries:
        """Store the index keys of the step's tokens, and return their index queries and weights.

        `query_latent` [T, query_rank] is not normalized.
        """
        keys = self._products.norm_linear(hidden, self._norm, self._key)
        queries = self._products.norm_linear(query_latent, self._query_norm, self._query_up)
        weights = self._products.norm_linear(hidden, self._norm, self._head_weights)
        return IndexQueries(self._kernels.index_store(queries, keys, layer, cache, layout), weights)

    def choose(self, index: IndexQueries, layer: LatentLayer, cache: Tensor, layout: StepLayout) -> Tensor:
        """Return the positions [T, top_k] that each of the step's tokens attends to; see `Kernels.choose_tokens`."""
        self._chosen.tokens = chosen = self._kernels.choose_tokens(index, layer, cache, layout)
        return chosen

    @property
    def last_choice(self) -> Tensor:
        """The last result of `choose` in this thread."""
        chosen: Tensor = self._chosen.tokens
        return chosen
