"""The Llama-family decoder: a stack of layers that says what is computed and leaves how to the kernels."""

from dataclasses import dataclass

from torch import Tensor

from engine.config.attention import AttentionShape, attention_shape
from engine.config.model import ModelConfig
from engine.kernels.base import Feed, Kernels, Linear, StepLayout
from engine.layers.rope import rope_table
from engine.models.parameters import Parameters


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights, as the kernels prepared them."""

    index: int
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention: AttentionShape
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """Llama 2 and 3, SmolLM2, Mistral, Qwen2 and Qwen3. Keeps the prepared weights, no state of requests."""

    def __init__(self, config: ModelConfig, parameters: Parameters, kernels: Kernels, max_context: int) -> None:
        self.config = config
        self._kernels = kernels
        self._embedding = parameters.embedding
        self._final_norm = parameters.final_norm
        self._lm_head = kernels.prepare(Linear(parameters.lm_head))
        self._rope = rope_table(config.rope, config.head_dim, max_context, parameters.embedding.device)
        self._layers = [_prepare_layer(config, parameters, kernels, layer) for layer in range(config.layers)]

    @property
    def prompts_capturable(self) -> bool:
        """See `Kernels`."""
        return self._kernels.prompts_capturable

    def end_trials(self) -> None:
        """See `Kernels.end_trials`."""
        self._kernels.end_trials()

    def forward(
        self, token_ids: Tensor, layout: StepLayout, cache: Tensor, drawn: Tensor | None, feed: Feed | None = None
    ) -> Tensor | None:
        """Stores the step's KV and returns logits [len(drawn), vocab] in the model's dtype.

        token_ids [T] int64; cache as in `Kernels.rope_and_store`; drawn [D] int64: tokens whose logits are asked for,
        None = every one; feed: see `Feed`. Nothing drawn (D = 0) gives None, and saves all that follows the last
        layer's store.
        """
        self._kernels.begin_step(cache, layout)
        hidden = self._kernels.embed(token_ids, self._embedding, feed)
        for layer in self._layers[:-1]:
            q = self._store(layer, hidden, layout, cache)
            self._finish(layer, self._attend(layer, q, layout, cache), hidden)
        last = self._layers[-1]
        q = self._store(last, hidden, layout, cache)
        if drawn is not None and len(drawn) == 0:
            return None
        mixed = self._attend(last, q, layout, cache)
        if drawn is not None:
            hidden, mixed = hidden[drawn], mixed[drawn]
        self._finish(last, mixed, hidden)
        return self._kernels.norm_linear(hidden, self._final_norm, self.config.norm_eps, self._lm_head)

    def _store(self, layer: DecoderLayer, hidden: Tensor, layout: StepLayout, cache: Tensor) -> Tensor:
        eps = self.config.norm_eps
        qkv = self._kernels.norm_linear(hidden, layer.input_norm, eps, layer.qkv)
        return self._kernels.rope_and_store(
            qkv, self._rope, layer.q_norm, layer.k_norm, eps, cache, layer.index, layout, layer.attention
        )

    def _attend(self, layer: DecoderLayer, q: Tensor, layout: StepLayout, cache: Tensor) -> Tensor:
        return self._kernels.attention(q, cache, layer.index, layout, layer.attention)

    def _finish(self, layer: DecoderLayer, mixed: Tensor, hidden: Tensor) -> None:
        """Adds attention's output and the MLP to the residual stream, in place."""
        self._kernels.linear_add(mixed, layer.output, hidden)
        active = self._kernels.norm_gate_up(hidden, layer.post_norm, self.config.norm_eps, layer.gate_up)
        self._kernels.linear_add(active, layer.down, hidden)


def _prepare_layer(config: ModelConfig, parameters: Parameters, kernels: Kernels, index: int) -> DecoderLayer:
    def linear(weight: Tensor, bias: Tensor | None) -> Linear:
        return kernels.prepare(Linear(weight[index], _at(bias, index)))

    return DecoderLayer(
        index=index,
        input_norm=parameters.input_norm[index],
        qkv=linear(parameters.qkv, parameters.qkv_bias),
        q_norm=_at(parameters.q_norm, index),
        k_norm=_at(parameters.k_norm, index),
        attention=attention_shape(config, index),
        output=linear(parameters.output, parameters.output_bias),
        post_norm=parameters.post_norm[index],
        gate_up=linear(parameters.gate_up, parameters.gate_up_bias),
        down=linear(parameters.down, parameters.down_bias),
    )


def _at(stacked: Tensor | None, index: int) -> Tensor | None:
    return None if stacked is None else stacked[index]
