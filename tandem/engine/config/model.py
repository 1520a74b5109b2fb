"""The spec of a model: what each layer computes, in terms that do not depend on the model's family.

The module of a family (`tandem/engine/models/families/`) creates the spec from config.json. The decoder, its
parameters, the KV cache, the roofline, the planner and the simulation read only the spec, and do not know the family.
"""

from dataclasses import dataclass

from tandem.engine.config.attention import AttentionShape, LatentShape
from tandem.engine.config.quantization import Quantization
from tandem.engine.config.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """The factor by which a query is multiplied after rotation: 1 + beta · ln(1 + ⌊position / interval⌋)."""

    beta: float
    interval: int
    """Number of positions that have the same factor."""


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
    norm_after_rope: bool = False
    """True if the queries and keys of each head are normalized after rotation instead of before it (Hunyuan)."""
    sinks: bool = False
    """True if each head has a learned score that is part of the softmax but has no value (gpt-oss)."""
    query_scaling: QueryScaling | None = None
    """The scaling of queries by their position (Ministral 3); None = queries are not scaled."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA).

    If `query_rank` is None, queries are computed directly from the hidden state.
    """

    shape: LatentShape
    rope: RopeConfig
    query_rank: int | None
    norm_eps: float
    """The epsilon of the norms of the latents, which differs from that of the model's other norms."""
    bias: bool = False
    """True if the projections that compute the latents, and the output projection, have biases."""
    query_scaling: QueryScaling | None = None
    """The scaling of queries by their position (Mistral 4); None = queries are not scaled."""


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
    """The activation: `silu`, or gpt-oss's `clamped_swiglu`.

    `clamped_swiglu` is gate · sigmoid(1.702 · gate) · (up + 1), with gate ≤ 7 and |up| ≤ 7.
    """
    bias: bool = False
    """True if the projections of the experts have biases."""
    shared_width: int = 0
    """The number of inner elements of the shared expert; 0 = there is none."""
    shared_gate: bool = False
    """True if the shared expert's output is multiplied by the sigmoid of a learned projection (Qwen2-MoE)."""
    local: range | None = None
    """The numbers of the experts whose weights this rank has, if experts are divided among ranks as a whole."""

    @property
    def local_experts(self) -> range:
        """The numbers of the experts whose weights this process has."""
        return range(self.experts) if self.local is None else self.local


Attention = GroupedQueryAttention | LatentAttention
FeedForward = DenseFeedForward | MixtureOfExperts


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: hidden += attention(norm(hidden)), then hidden += feed_forward(norm(hidden))."""

    attention: Attention
    feed_forward: FeedForward
    output_norms: bool = False
    """True if the outputs of attention and feed-forward network are normalized before they are added (Gemma)."""
    input_norms: bool = True
    """False if attention and feed-forward network take hidden states that are not normalized (OLMo 2)."""
    parallel: bool = False
    """True if the feed-forward network takes the same input as attention, with the same norm (Cohere)."""


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
    embedding_scale: float = 1.0
    """The factor by which embeddings are multiplied; rounded to the model's dtype."""
    logits_scale: float = 1.0
    """The factor by which the logits are multiplied."""
    logits_softcap: float | None = None
    """The cap of logits: softcap · tanh(logit / softcap), applied after the scale; None = no cap."""
    quantization: Quantization | None = None
    """The quantization schemes of the weights; None = all weights are in the model's dtype."""
    page_layers: tuple[int, ...] = ()
    """The number of layers per KV page of each class of layers (`page_layers` in kv.py); empty = chosen by the spec.

    A rank's spec has those of the whole model, so that the ranks divide pages in the same way.
    """

    @property
    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """The distinct shapes of the layers with grouped-query attention, in the order of the layers."""
        attentions = (layer.attention for layer in self.layers)
        return tuple(
            dict.fromkeys(attention.shape for attention in attentions if isinstance(attention, GroupedQueryAttention))
        )

    @property
    def latent_shapes(self) -> tuple[LatentShape, ...]:
        """The distinct shapes of the layers with latent attention, in the order of the layers."""
        attentions = (layer.attention for layer in self.layers)
        return tuple(
            dict.fromkeys(attention.shape for attention in attentions if isinstance(attention, LatentAttention))
        )

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
        """The maximum number of query heads in any layer."""
        return max(layer.attention.shape.heads for layer in self.layers)
