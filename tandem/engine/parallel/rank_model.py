"""The decoder model of one rank of a group, and its matrix products."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.base import DeferredTokens, Kernels, Products, StepLayout
from tandem.engine.kernels.kv_cache import GroupCache
from tandem.engine.kernels.layers import ExpertsLayer, Linear, Norm
from tandem.engine.kernels.lora.adapted_products import AdaptedProducts
from tandem.engine.models.feed_forward import ExpertsBlock, SeparateExpertsBlock
from tandem.engine.models.layers import DecoderLayer
from tandem.engine.models.parameters import Parameters
from tandem.engine.parallel.collectives import Collectives
from tandem.engine.parallel.group_model import GroupModel
from tandem.engine.steps.prompt_scoring import StepPieces


class RankProducts(Products):
    """The matrix products of one rank, computed by `base`: the rank's kernels, with or without adapters.

    The inputs of `linear` and `linear_add` are divided among the ranks, and so are the inner elements of each expert.
    The output of `base` is then only one term of a sum, and this class adds the terms of all ranks.
    """

    def __init__(self, base: Products, collectives: Collectives) -> None:
        self._base, self._collectives = base, collectives
        self.readers: Mapping[int, _Reader] = {}
        """The reader of the residual stream directly after each sum, see `_readers`; empty until the layers exist."""
        self._normed: tuple[Norm, Tensor] | None = None
        """The result of a norm that was computed with the last sum, and is due to that norm's product."""

    def prepare(self, linear: Linear) -> Linear:
        """Prepare the weight as `base` does."""
        return self._base.prepare(linear)

    def norm_linear(self, hidden: Tensor, norm: Norm | None, linear: Linear) -> Tensor:
        """Return the outputs of this rank's rows of the weight, without communication."""
        x, due = self._input(hidden, norm)
        return self._base.norm_linear(x, due, linear)

    def norm_gate_up(self, hidden: Tensor, norm: Norm | None, gate_up: Linear, activation: str = "silu") -> Tensor:
        """Return this rank's inner elements of the feed-forward network, without communication."""
        x, due = self._input(hidden, norm)
        return self._base.norm_gate_up(x, due, gate_up, activation)

    def _input(self, hidden: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
        """Return the input of a product, and the norm that the product must still apply, or None."""
        if self._normed is None or self._normed[0] is not norm:
            return hidden, norm
        (_, normed), self._normed = self._normed, None
        return normed, None

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Compute this rank's term, and return the sum of the terms of all ranks."""
        term = self._base.linear(x, linear)
        self._collectives.all_reduce(term)
        return term

    def linear_add(self, x: Tensor, linear: Linear, hidden: Tensor) -> None:
        """Add the sum of the terms of all ranks to `hidden` in place."""
        if not self._collectives.sums_in_place(hidden):
            self._add_sum(self._base.linear(x, linear), hidden, linear)
            return
        if self._collectives.rank.number > 0:
            # The term of the stage's first rank has the residual stream, which the sum must have once.
            hidden.zero_()
        self._base.linear_add(x, linear, hidden)
        self._collectives.all_reduce(hidden)

    def experts(self, hidden: Tensor, layer: ExpertsLayer, slots: Tensor, out: Tensor) -> None:
        """Compute this rank's term of the experts' output, and add the sum over all ranks to `out` in place."""
        term = torch.zeros_like(out)
        self._base.experts(hidden, layer, slots, term)
        self._add_sum(term, out, layer)

    def _add_sum(self, term: Tensor, hidden: Tensor, product: Linear | ExpertsLayer) -> None:
        """Add the sum of the terms of all ranks to `hidden`.

        If the norm that follows would have a kernel of its own, that of the sum computes it, too.
        """
        reader = self.readers.get(id(product))
        apart = reader is not None and self._base.norms_apart(hidden, reader.linear)
        norm = reader.norm if reader is not None and apart else None
        normed = self._collectives.all_reduce_add(term, hidden, norm)
        self._normed = None if norm is None or normed is None else (norm, normed)


class _Reader(NamedTuple):
    """A product that reads the residual stream, and the norm of its input."""

    norm: Norm
    linear: Linear


def _readers(layers: Sequence[DecoderLayer]) -> dict[int, _Reader]:
    """Return the product that reads the residual stream directly after each product that is added to it.

    The keys are the `id` of the added product. Experts read the stream with their router, which applies the norm. A
    layer that scales the stream at its end, or adds an embedding of its own, has no reader after its last product.
    """
    readers: dict[int, _Reader] = {}
    added: Linear | ExpertsLayer | None = None
    for layer in layers:
        # The output of attention is added last if the feed-forward network has the same input.
        for block in (layer.attention, None if layer.parallel else layer.feed_forward):
            if isinstance(block, SeparateExpertsBlock):
                added = None  # the sum of its experts is normalized before it is added to the stream
            elif isinstance(block, ExpertsBlock):
                added = block.layer
            elif block is not None:
                if added is not None and isinstance(block.norm, Norm):
                    readers[id(added)] = _Reader(block.norm, block.input)
                added = block.output
        if layer.scale is not None or layer.embedding is not None:
            added = None
    return readers


class RankModel(GroupModel):
    """One rank's part of a decoder model.

    Each stage runs its layers, and sends the hidden states to the next one. The first rank of the last stage gets the
    logits; on the other ranks `forward` returns None, as in `DecoderModel`, or a tensor without meaning: zeros in the
    earlier stages, because a CUDA graph samples from it.
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
        """Prepare this rank's weights for `kernels`; `spec` is the result of `own_spec`.

        The leading rank may have the whole output layer, of which it computes its own rows. `adapted` is that of
        `DecoderModel`, with this rank's part of the adapters.
        """
        rank = collectives.rank
        if rank.leads:
            rows = rank.rows(spec.vocab_size)
            parameters = replace(parameters, lm_head=parameters.lm_head[: len(rows)])
        super().__init__(spec, parameters, kernels, max_context, collectives=collectives, adapted=adapted)
        if isinstance(self._products, RankProducts):
            self._products.readers = _readers(self._layers)
        if rank.stage > 0:
            self._embedding_scale = None  # the first stage has scaled what this one receives

    def _layer_products(self, kernels: Kernels, adapted: AdaptedProducts | None) -> Products:
        products = super()._layer_products(kernels, adapted)
        return products if self._rank.count == 1 else RankProducts(products, self._collectives)

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
        """Run this rank's part of a step. A step ends on the leading rank only after every rank has stored its KV.

        The last stage computes logits, as `DecoderModel.forward` does; the others send the hidden states of all tokens.
        """
        if self._rank.in_last_stage:
            logits = super().forward(token_ids, layouts, caches, drawn, feed, scoring=scoring)
            if drawn is not None and len(drawn) == 0 and self._rank.count > 1:
                # Nothing is summed after the KV of the last layer is stored.
                self._collectives.barrier(self._final_norm.weight)
            return logits
        hidden = self._begin_step(token_ids, layouts, caches, feed)
        for number in range(len(self._layers)):
            self.run_layer(number, hidden, layouts, caches)
        self._collectives.send(hidden)
        rows = len(token_ids if drawn is None else drawn)
        return hidden.new_zeros(rows, self.spec.vocab_size) if rows and scoring is None else None

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = super()._logits(hidden)
        return logits if self._rank.count == 1 else self._collectives.gather_columns(logits, self.spec.vocab_size)
