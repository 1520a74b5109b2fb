"""The spec of a model: what each of its layers computes, independent of the model's family.

The file of a family (`tandem/engine/models/families/`) creates it from config.json. The decoder, its parameters, the KV
cache, the roofline, the planner and the simulation read only the spec, and know no family.
"""

from dataclasses import dataclass

from tandem.engine.config.attention import AttentionShape, LatentShape
from tandem.engine.config.quantization import Quantization
from tandem.engine.config.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Attention of `shape.heads` query heads over `shape.kv_heads` heads of keys and values."""

    shape: AttentionShape
    rope: RopeConfig | None
    """None = this layer has no position embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: int = 0
    """RMSNorm of queries and keys before the rotation: the number of elements normalized together, 0 = no norm.

    `head_dim` normalizes each head by itself, with the same weights for all heads; `heads · head_dim` normalizes the
    whole row, with one weight per element.
    """
    sinks: bool = False
    """True if each head has a learned score that takes part in the softmax but has no value (gpt-oss)."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention. If `query_rank` is None, queries are computed directly from the hidden state."""

    shape: LatentShape
    rope: RopeConfig
    query_rank: int | None
    norm_eps: float
    """The epsilon of the latents' norms, which differs from the model's own."""
    bias: bool = False
    """True if the products that compute the latents, and the output product, have biases."""


@dataclass(frozen=True, slots=True)
class DenseFeedForward:
    """The feed-forward network down · (activation(gate) · up), with `width` inner elements."""

    width: int
    activation: str = "silu"
    """`silu` or `gelu_tanh`."""
    bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertRouter:
    """The rule that chooses a token's experts by the router's logits, which are computed and kept in float32."""

    score: str = "softmax"
    """`softmax` or `sigmoid` over all experts' logits, or `softmax_of_top_k` over those of the chosen experts only."""
    renormalize: bool = True
    """True if the scores of the chosen experts are divided by their sum."""
    scaling: float = 1.0
    """The factor of the experts' weights."""
    groups: int = 1
    """The number of groups of neighbouring experts; experts are chosen only from the best `top_groups` groups."""
    top_groups: int = 1
    group_score: str = "max"
    """A group's score is the `max` of its experts' scores, or the sum of the two highest (`top_2_sum`)."""
    choice_bias: bool = False
    """True if a learned bias is added to the scores for the choice of experts, not for their weights (DeepSeek-V3)."""
    bias: bool = False
    """True if the router's product has a bias (gpt-oss)."""


SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""The constants of the activation `clamped_swiglu`."""


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """A feed-forward network of `experts`, of which each token uses `top_k`, and the shared expert if there is one."""

    experts: int
    top_k: int
    width: int
    """The inner elements of each expert."""
    router: ExpertRouter
    activation: str = "silu"
    """`silu`, or `clamped_swiglu`: gate · sigmoid(1.702 · gate) · (up + 1), with gate ≤ 7 and |up| ≤ 7 (gpt-oss)."""
    bias: bool = False
    """True if the experts' products have biases."""
    shared_width: int = 0
    """The inner elements of the shared expert, 0 = none."""
    shared_gate: bool = False
    """True if the shared expert's output is multiplied by the sigmoid of a learned product (Qwen2-MoE)."""


Attention = GroupedQueryAttention | LatentAttention
FeedForward = DenseFeedForward | MixtureOfExperts


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: hidden += attention(norm(hidden)), then hidden += feed_forward(norm(hidden))."""

    attention: Attention
    feed_forward: FeedForward
    output_norms: bool = False
    """True if the outputs of attention and of the feed-forward network are normalized before they are added (Gemma)."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The spec of a decoder. Sizes are in elements, contexts in tokens."""

    architecture: str
    """The transformers class that computes the same model, for example `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_context: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    """The dtype that the checkpoint states, None if it states none."""
    wide_norms: bool = False
    """True if norm weights are kept in float32 and applied before the result is rounded (Gemma)."""
    embedding_scale: float = 1.0
    """The factor of the embeddings; rounded to the model's dtype."""
    logits_scale: float = 1.0
    """The factor of the logits."""
    logits_softcap: float | None = None
    """Logits are softcap · tanh(logit / softcap), after the scale; None = unchanged."""
    quantization: Quantization | None = None
    """The schemes of quantized weights; None = all are in the model's dtype."""

    @property
    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """The distinct shapes of the layers with grouped-query attention, in the order of the layers."""
        found = (layer.attention for layer in self.layers)
        return tuple(dict.fromkeys(each.shape for each in found if isinstance(each, GroupedQueryAttention)))

    @property
    def latent_shapes(self) -> tuple[LatentShape, ...]:
        """The distinct shapes of the layers with latent attention, in the order of the layers."""
        found = (layer.attention for layer in self.layers)
        return tuple(dict.fromkeys(each.shape for each in found if isinstance(each, LatentAttention)))

    @property
    def dense_widths(self) -> set[int]:
        """The inner sizes of the dense feed-forward networks."""
        found = (layer.feed_forward for layer in self.layers)
        return {each.width for each in found if isinstance(each, DenseFeedForward)}

    @property
    def shared_widths(self) -> set[int]:
        """The inner sizes of the shared experts, which are dense networks."""
        found = (layer.feed_forward for layer in self.layers)
        return {each.shared_width for each in found if isinstance(each, MixtureOfExperts) and each.shared_width}

    @property
    def heads(self) -> int:
        """The largest number of query heads in any layer."""
        return max(layer.attention.shape.heads for layer in self.layers)
