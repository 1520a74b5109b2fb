"""The decoder of every model family: its layers define the computation, and the kernels carry it out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.config.model import ModelSpec
from tandem.engine.expert_tokens import ExpertTokens
from tandem.engine.kernels.base import DeferredTokens, Kernels, Products, StepLayout
from tandem.engine.kernels.kv_cache import GroupCache, kv_of
from tandem.engine.kernels.layers import Linear
from tandem.engine.kernels.lora.adapted_products import AdaptedProducts
from tandem.engine.models.blocks import Queries, StateBlock, normed_linear
from tandem.engine.models.layer_embedding import LayerEmbeddings, embedded
from tandem.engine.models.layers import DecoderLayer, input_norm, prepare_layers
from tandem.engine.models.parameters import Parameters
from tandem.engine.steps.prompt_scoring import StepPieces


class DecoderModel:
    """A decoder model of any family. It owns the weights prepared for the kernels, and keeps no state of requests.

    The engine's thread calls it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Parameters,
        kernels: Kernels,
        max_context: int,
        *,
        adapted: AdaptedProducts | None = None,
    ) -> None:
        """Prepare the weights for `kernels`.

        `adapted` applies LoRA adapters to the matrix products of `kernels`; None if the engine has no adapter slots.
        """
        self.spec = spec
        self.dtype = parameters.dtype
        """The dtype of the activations."""
        self.kernels = kernels
        self._updates = None if adapted is None else adapted.updates
        self._products = self._layer_products(kernels, adapted)
        self._final_norm = input_norm(spec, parameters.final_norm, parameters.final_norm_bias)
        self._lm_head = kernels.prepare(Linear(parameters.lm_head))
        # If the kernels rearranged a tied table for the output layer, that copy serves as the embedding too.
        tied = parameters.lm_head is parameters.embedding
        self._embedding = self._lm_head.weight if tied else parameters.embedding
        device = parameters.final_norm.device
        # Rounded to the model's dtype before the product, as transformers does.
        scale = torch.tensor(spec.embedding_scale, dtype=parameters.dtype).item()
        self._embedding_scale = None if scale == 1.0 else scale
        self._layer_embeddings: LayerEmbeddings | None = None
        if parameters.layer_embedding is not None:
            self._layer_embeddings = LayerEmbeddings(spec, parameters.layer_embedding, parameters.dtype, kernels)
        self.expert_tokens = ExpertTokens(spec, device)
        self._layers = prepare_layers(
            spec, parameters, kernels, self._products, max_context=max_context, expert_tokens=self.expert_tokens
        )

    def _layer_products(self, kernels: Kernels, adapted: AdaptedProducts | None) -> Products:
        return kernels if adapted is None else adapted

    @property
    def trial_tokens(self) -> tuple[int, ...]:
        """The token counts of trial steps for adapter updates (`LoraUpdates.trial_tokens`); empty without adapters."""
        return () if self._updates is None else self._updates.trial_tokens

    def run_layer(
        self,
        number: int,
        hidden: Tensor,
        layouts: Sequence[StepLayout],
        caches: Sequence[GroupCache],
        embedding: Tensor | None = None,
    ) -> None:
        """Store the KV of layer `number`, and add its attention and feed-forward outputs to `hidden` in place.

        `embedding` [T, size] is the layer's own embedding of the tokens, if it has one.
        """
        layer = self._layers[number]
        layout, cache = layouts[layer.group], caches[layer.group]
        q = self._store(layer, hidden, layout, cache)
        self._finish(layer, layer.attention.attend(q, layout, cache), hidden, layouts[0].slots, embedding)

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
        """Store the KV of a step and return logits [len(drawn), vocab] in the model's dtype.

        token_ids  [T] int64
        layouts    one for each group of layers
        caches     the view of the pages (`PagedCache.views`) of each group of layers
        drawn      [D] int64: the indices of the tokens whose logits are computed; None = all tokens
        feed       the token ids that only the device has, see `DeferredTokens`
        scoring    computes log probabilities of prompt tokens; `drawn` then ends with the scored positions, whose
                   logits are not returned

        If D = 0, returns None as soon as the KV of the last layer is stored.
        """
        hidden = self._drawn_states(token_ids, layouts, caches, drawn, feed)
        return None if hidden is None else self._step_logits(hidden, scoring)

    def _drawn_states(
        self,
        token_ids: Tensor,
        layouts: Sequence[StepLayout],
        caches: Sequence[GroupCache],
        drawn: Tensor | None,
        feed: DeferredTokens | None,
    ) -> Tensor | None:
        """Run a step as `forward` does, up to the hidden states [D, H] after the last layer."""
        hidden = self._begin_step(token_ids, layouts, caches, feed)
        embeddings: Sequence[Tensor | None] = [None] * len(self._layers)
        if self._layer_embeddings is not None:
            embeddings = self._layer_embeddings(token_ids, hidden, feed).unbind(1)
        for number, embedding in enumerate(embeddings[:-1]):
            self.run_layer(number, hidden, layouts, caches, embedding)
        last = self._layers[-1]
        layout, cache = layouts[last.group], caches[last.group]
        q = self._store(last, hidden, layout, cache)
        if drawn is not None and len(drawn) == 0:
            # No row needs logits, so the last layer's attention and feed-forward network have no effect.
            return None
        mixed = last.attention.attend(q, layout, cache)
        slots, embedding = layouts[0].slots, embeddings[-1]
        if drawn is not None:
            if self._updates is not None:
                self._updates.keep_tokens(drawn)
            hidden, mixed, slots = hidden[drawn], mixed[drawn], slots[drawn]
            embedding = None if embedding is None else embedding[drawn]
        self._finish(last, mixed, hidden, slots, embedding)
        return hidden

    def accept_drafts(self, layouts: Sequence[StepLayout], caches: Sequence[GroupCache]) -> None:
        """Write the states after the accepted draft tokens of the newest step; see `StateBlock.accept_drafts`."""
        for layer in self._layers:
            if isinstance(layer.attention, StateBlock):
                layer.attention.accept_drafts(layouts[layer.group], caches[layer.group])

    def _begin_step(
        self,
        token_ids: Tensor,
        layouts: Sequence[StepLayout],
        caches: Sequence[GroupCache],
        feed: DeferredTokens | None,
    ) -> Tensor:
        """Prepare the kernels for a step, and return the hidden states [T, H] before the first layer."""
        for layout, cache in zip(reversed(layouts), reversed(caches), strict=True):
            if layout.state_pages is None:
                self.kernels.begin_step(kv_of(cache), layout)
        if self._updates is not None:
            self._updates.begin_step(layouts[0].adapters)
        hidden = self._embed(token_ids, feed)
        if self._embedding_scale is not None:
            hidden *= self._embedding_scale
        return hidden

    def _embed(self, token_ids: Tensor, feed: DeferredTokens | None) -> Tensor:
        return embedded(self.kernels, self._embedding, token_ids, feed, self.dtype)

    def _store(self, layer: DecoderLayer, hidden: Tensor, layout: StepLayout, cache: GroupCache) -> Queries:
        """Store the KV of the step's tokens in one layer, and return their queries."""
        return layer.attention.store(hidden, layout, cache)

    def _finish(
        self, layer: DecoderLayer, mixed: Tensor, hidden: Tensor, slots: Tensor, embedding: Tensor | None = None
    ) -> None:
        """Add a layer's attention and feed-forward outputs, and its embedding, to the residual stream, in place."""
        if layer.parallel and layer.feed_forward is not None:
            # Attention has already read its input, so the order of the additions does not matter to it.
            layer.feed_forward.add(hidden, slots, layer.feed_forward_output_norm)
        if layer.attention_output_norm is None:
            self._products.linear_add(mixed, layer.attention.output, hidden)
        else:
            out = self._products.linear(mixed, layer.attention.output)
            self.kernels.norm_add(out, layer.attention_output_norm, hidden)
        if not layer.parallel and layer.feed_forward is not None:
            layer.feed_forward.add(hidden, slots, layer.feed_forward_output_norm)
        if layer.embedding is not None and embedding is not None:
            layer.embedding.add(hidden, embedding)
        if layer.scale is not None:
            hidden *= layer.scale

    def _step_logits(self, hidden: Tensor, scoring: StepPieces | None) -> Tensor | None:
        """Return the logits of hidden states; the scored positions, which are the last ones, only give their scores."""
        return self._logits(hidden) if scoring is None else scoring.logits(hidden, self._logits)

    def _logits(self, hidden: Tensor) -> Tensor:
        spec = self.spec
        logits = normed_linear(self.kernels, hidden, self._final_norm, self._lm_head)
        if spec.logits_scale != 1.0:
            logits *= spec.logits_scale
        if spec.logits_softcap is not None:
            logits.div_(spec.logits_softcap).tanh_().mul_(spec.logits_softcap)
        return logits
