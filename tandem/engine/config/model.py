"""The spec of a model: what each layer computes, in terms that do not depend on the model's family.

The module of a family (`tandem/engine/models/families/`) creates the spec from config.json. The decoder, its
parameters, the KV cache, the roofline, the planner and the simulation read only the spec, and do not know the family.
"""

from dataclasses import dataclass, replace

from tandem.engine.config.attention import AttentionShape, LatentShape
from tandem.engine.config.quantization import Quantization
from tandem.engine.config.rope import RopeConfig
from tandem.engine.config.state_layers import StateLayer


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """The factor of a query, applied after rotation: 1 + beta · ln(1 + ⌊(position + offset) / interval⌋)."""

    beta: float
    interval: int
    """Number of positions that have the same factor."""
    offset: int = 0


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Grouped-query attention: `shape.heads` query heads over `shape.kv_heads` heads of keys and values."""

    shape: AttentionShape
    rope: RopeConfig | None
    """The rotary embedding of this layer; None = the layer has no position embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: int = 0
    """The number of elements that RMSNorm of queries and keys normalizes together, before rotation; 0 = no norm.

    `head_dim` normalizes each head by itself, with the same weights for all heads; `heads · head_dim` normalizes the
    whole row, with one weight per element.
    """
    qk_norm_weights: bool = True
    """False if the norm of queries and keys has no weights (Llama 4)."""
    norm_after_rope: bool = False
    """True if the queries and keys of each head are normalized after rotation instead of before it (Hunyuan)."""
    sinks: bool = False
    """True if each head has a learned score that is part of the softmax but has no value (gpt-oss)."""
    query_scaling: QueryScaling | None = None
    """The scaling of queries by their position (Ministral 3); None = queries are not scaled."""
    output_gate: bool = False
    """True if the output of each head is multiplied by the sigmoid of a projection of the input (Qwen3-Next)."""
    output_scale: float = 1.0
    """The factor by which the outputs of the heads are multiplied (MiMo-V2)."""
    value_norm: bool = False
    """True if the values of each head are normalized by RMSNorm without weights (Gemma 4)."""
    values_from_keys: bool = False
    """True if values are computed with the weights of the keys, which the stacked weight has twice (Gemma 4)."""
    kv_layer: int | None = None
    """The number of the earlier layer to whose keys and values this layer attends; None = it has its own (Gemma 4)."""

    @property
    def projected(self) -> AttentionShape:
        """The shape of the projection of q, k and v: without KV heads if the layer has no own keys and values."""
        return self.shape if self.kv_layer is None else replace(self.shape, kv_heads=0)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA).

    If `query_rank` is None, queries are computed directly from the hidden state.
    """

    shape: LatentShape
    rope: RopeConfig | None
    """The rotary embedding of this layer; None = the layer has no position embedding (Kimi-Linear)."""
    query_rank: int | None
    norm_eps: float
    """The epsilon of the norms of the latents, which differs from that of the model's other norms."""
    bias: bool = False
    """True if the projections that compute the latents, and the output projection, have biases."""
    query_scaling: QueryScaling | None = None
    """The scaling of queries by their position (Mistral 4); None = queries are not scaled."""
    shares_choice: bool = False
    """True if the layer attends to the tokens that the indexer of the last layer before it with one has chosen."""

    @property
    def sparse(self) -> bool:
        """True if a token attends to chosen tokens only."""
        return self.shape.index is not None or self.shares_choice


@dataclass(frozen=True, slots=True)
class DenseFeedForward:
    """The feed-forward network down · (activation(gate) · up) with `width` inner elements."""

    width: int
    activation: str = "silu"
    """The activation function: `silu`, `gelu_tanh`, or `relu2`, which is max(0, x)²."""
    bias: bool = False
    gated: bool = True
    """False for down · activation(up), which has no gate (Arcee)."""


@dataclass(frozen=True, slots=True)
class ExpertRouter:
    """The rule that chooses a token's experts from the router's logits, which are computed in float32."""

    score: str = "softmax"
    """The score function: `softmax` or `sigmoid` over all experts, or `softmax_of_top_k` over the chosen experts."""
    renormalize: bool = True
    """True if the scores of the chosen experts are divided by their sum."""
    scaling: float = 1.0
    """The factor by which the experts' weights are multiplied."""
    groups: int = 1
    """The number of groups of adjacent experts; experts are chosen only from the best `top_groups` groups."""
    top_groups: int = 1
    group_score: str = "max"
    """The score of a group: `max`, its highest expert score, or `top_2_sum`, the sum of its two highest."""
    choice_bias: bool = False
    """True if a learned bias is added to the scores only to choose experts, not to weight them (DeepSeek-V3)."""
    bias: bool = False
    """True if the router's projection has a bias (gpt-oss)."""
    on_input: bool = False
    """True if the inputs of the experts are multiplied by the experts' weights, instead of their outputs (Llama 4)."""
    own_norm: bool = False
    """True if the router's input is normalized with other weights than that of the experts (Gemma 4)."""
    expert_scales: bool = False
    """True if each expert's weight is multiplied by a learned number of the expert (Gemma 4)."""


SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""The constants 1.702 and 7 of the activation `clamped_swiglu`, see `MixtureOfExperts.activation`."""


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """A feed-forward network of `experts` experts, of which each token uses `top_k`, and an optional shared expert."""

    experts: int
    top_k: int
    width: int
    """The number of inner elements of each expert."""
    router: ExpertRouter
    activation: str = "silu"
    """The activation: `silu`, `gelu_tanh`, `relu2`, which is max(0, x)² and has no gate, or gpt-oss's `clamped_swiglu`.

    `clamped_swiglu` is gate · sigmoid(1.702 · gate) · (up + 1), with gate ≤ 7 and |up| ≤ 7.
    """
    bias: bool = False
    """True if the projections of the experts have biases."""
    shared_width: int = 0
    """The number of inner elements of the shared expert; 0 = there is none."""
    shared_gate: bool = False
    """True if the shared expert's output is multiplied by the sigmoid of a learned projection (Qwen2-MoE)."""
    separate_norms: bool = False
    """True if the shared expert and the others have norms of their own, of their inputs and of their outputs (Gemma 4).

    The sum of both outputs is then normalized by the layer's output norm, see `LayerSpec.output_norms`.
    """
    latent: int = 0
    """The number of dimensions of the experts' inputs and outputs, if it differs from the hidden size (Nemotron 3).

    The normalized hidden state is projected down for the experts, and the sum of their outputs up again; the router and
    the shared expert take the hidden state itself. 0 = experts take and give hidden states.
    """
    local: range | None = None
    """The numbers of the experts whose weights this rank has, if experts are divided among ranks as a whole."""

    @property
    def gated(self) -> bool:
        """False if the experts, and the shared expert, are down · activation(up)."""
        return self.activation != "relu2"

    @property
    def shared_activation(self) -> str:
        """The activation of the shared expert."""
        return "silu" if self.activation == "clamped_swiglu" else self.activation

    def outer(self, hidden: int) -> int:
        """Return the number of elements of an expert's input and output; `hidden` is the hidden size."""
        return self.latent or hidden

    @property
    def local_experts(self) -> range:
        """The numbers of the experts whose weights this process has."""
        return range(self.experts) if self.local is None else self.local


Attention = GroupedQueryAttention | LatentAttention | StateLayer
FeedForward = DenseFeedForward | MixtureOfExperts


def rope_of(attention: Attention) -> RopeConfig | None:
    """Return the rotary embedding of a layer; None if it has none."""
    return None if isinstance(attention, StateLayer) else attention.rope


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: hidden += attention(norm(hidden)), then hidden += feed_forward(norm(hidden))."""

    attention: Attention
    feed_forward: FeedForward | None
    """The feed-forward network; None if the layer has only attention (Nemotron-H)."""
    output_norms: bool = False
    """True if the outputs of attention and feed-forward network are normalized before they are added (Gemma)."""
    input_norms: bool = True
    """False if attention and feed-forward network take hidden states that are not normalized (OLMo 2)."""
    parallel: bool = False
    """True if the feed-forward network takes the same input as attention, with the same norm (Cohere)."""
    scaled: bool = False
    """True if the hidden states after the layer are multiplied by a learned number (Gemma 4)."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The spec of a decoder model. Sizes are in elements, contexts in tokens."""

    architecture: str
    """The transformers class that computes this model, for example `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_context: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    """The dtype that the checkpoint states; None if it states none."""
    wide_norms: bool = False
    """True if norm weights are kept in float32 and applied before the result is rounded (Gemma)."""
    layer_norms: bool = False
    """True if the norms are LayerNorm, which subtracts the mean, instead of RMSNorm (Cohere)."""
    norm_bias: bool = False
    """True if the norms have biases; only LayerNorm may have them (Nemotron)."""
    layer_embedding: int = 0
    """The number of elements of the embedding of each token that each layer has for itself (Gemma 4 E2B); 0 = none.

    After the feed-forward network, hidden += norm(W2 · (gelu(W1 · hidden) · e)), where e is the sum of this embedding
    and a projection of the hidden states before the first layer.
    """
    embedding_scale: float = 1.0
    """The factor by which embeddings are multiplied; rounded to the model's dtype."""
    logits_scale: float = 1.0
    """The factor by which the logits are multiplied."""
    logits_softcap: float | None = None
    """The cap of logits: softcap · tanh(logit / softcap), applied after the scale; None = no cap."""
    quantization: Quantization | None = None
    """The quantization schemes of the weights; None = all weights are in the model's dtype."""
    separate_experts: bool = False
    """True if the checkpoint has a tensor for each matrix of each expert, even if those of the family stack experts."""
    page_layers: tuple[int, ...] = ()
    """The number of layers per KV page of each class of layers (`page_layers` in kv.py); empty = chosen by the spec.

    A rank's spec has those of the whole model, so that the ranks divide pages in the same way.
    """

    @property
    def has_states(self) -> bool:
        """True if the model has state layers."""
        return any(isinstance(layer.attention, StateLayer) for layer in self.layers)

    @property
    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """The distinct shapes of the layers with grouped-query attention, in the order of the layers."""
        attentions = (layer.attention for layer in self.layers)
        return tuple(
            dict.fromkeys(attention.shape for attention in attentions if isinstance(attention, GroupedQueryAttention))
        )

    @property
    def latent_shapes(self) -> tuple[LatentShape, ...]:
        """The distinct shapes of the layers with latent attention to all tokens, in the order of the layers."""
        return tuple(dict.fromkeys(latent.shape for latent in self._latent if not latent.sparse))

    @property
    def sparse_shapes(self) -> tuple[LatentShape, ...]:
        """The distinct shapes of the layers with latent attention to chosen tokens, in the order of the layers."""
        return tuple(dict.fromkeys(latent.shape for latent in self._latent if latent.sparse))

    @property
    def _latent(self) -> tuple[LatentAttention, ...]:
        return tuple(layer.attention for layer in self.layers if isinstance(layer.attention, LatentAttention))

    @property
    def dense_widths(self) -> set[int]:
        """The inner sizes of the dense feed-forward networks."""
        networks = (layer.feed_forward for layer in self.layers)
        return {network.width for network in networks if isinstance(network, DenseFeedForward)}

    @property
    def shared_widths(self) -> set[int]:
        """The inner sizes of the shared experts, which are dense networks."""
        networks = (layer.feed_forward for layer in self.layers)
        return {
            network.shared_width
            for network in networks
            if isinstance(network, MixtureOfExperts) and network.shared_width
        }

    @property
    def heads(self) -> int:
        """The maximum number of query heads in any layer with attention."""
        attentions = (layer.attention for layer in self.layers)
        return max(attention.shape.heads for attention in attentions if not isinstance(attention, StateLayer))
