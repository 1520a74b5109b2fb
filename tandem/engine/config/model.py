"""The specification of a model: what each of its layers computes, whatever family it belongs to.

A family's file (`tandem/engine/models/families/`) makes it from config.json. The decoder, its parameters, the KV
cache, the roofline, the planner and the simulation read it and know no family.
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
    """None = positions are not embedded in this layer."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: int = 0
    """RMSNorm of queries and keys before the rotation: 0 = none, else the number of elements that share a norm.

    `head_dim` norms each head by itself (one weight for all heads); `heads · head_dim` norms the whole row, with a
    weight for each element.
    """
    sinks: bool = False
    """True if each head has a learned score that takes part in the softmax and has no value (gpt-oss)."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention; `query_rank` None = queries are computed from the hidden state directly."""

    shape: LatentShape
    rope: RopeConfig
    query_rank: int | None
    norm_eps: float
    """The epsilon of the norms of the latents, which is not the model's own."""
    bias: bool = False
    """Bias of the products that compute the latents and of the output product."""


@dataclass(frozen=True, slots=True)
class DenseFeedForward:
    """down · (activation(gate) · up) with `width` inner elements."""

    width: int
    activation: str = "silu"
    """`silu` or `gelu_tanh`."""
    bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertRouter:
    """The choice of a token's experts from the router's logits, which are computed and kept in float32."""

    score: str = "softmax"
    """`softmax` or `sigmoid` of all experts' logits, or `softmax_of_top_k` of the chosen ones' alone."""
    renormalize: bool = True
    """True if the chosen experts' scores are divided by their sum."""
    scaling: float = 1.0
    """Multiplies the weights."""
    groups: int = 1
    """Experts are divided into so many groups of neighbours, of which only the best `top_groups` are chosen from."""
    top_groups: int = 1
    group_score: str = "max"
    """A group's score is the `max` of its experts', or the sum of its two highest (`top_2_sum`)."""
    choice_bias: bool = False
    """True if a learned bias is added to the scores to choose experts, but not to weigh them (DeepSeek-V3)."""
    bias: bool = False
    """True if the router's product has a bias (gpt-oss)."""


SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""The constants of the activation `clamped_swiglu`."""


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Each token passes through `top_k` of `experts` feed-forward networks, and through the shared one if it exists."""

    experts: int
    top_k: int
    width: int
    """Inner elements of each expert."""
    router: ExpertRouter
    activation: str = "silu"
    """`silu`, or `clamped_swiglu`: gate · sigmoid(1.702 · gate) · (up + 1), with gate ≤ 7 and |up| ≤ 7 (gpt-oss)."""
    bias: bool = False
    """True if the experts' products have biases."""
    shared_width: int = 0
    """Inner elements of the shared expert, 0 = none."""
    shared_gate: bool = False
    """True if the shared expert's output is multiplied with the sigmoid of a learned product (Qwen2-MoE)."""


Attention = GroupedQueryAttention | LatentAttention
FeedForward = DenseFeedForward | MixtureOfExperts


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: hidden += attention(norm(hidden)), then hidden += feed_forward(norm(hidden))."""

    attention: Attention
    feed_forward: FeedForward
    output_norms: bool = False
    """True if the outputs of attention and of the feed-forward network are normed before they are added (Gemma)."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder; sizes are counts of elements, contexts of tokens."""

    architecture: str
    """The class of transformers that computes the same, e.g. `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_context: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    """The checkpoint's own dtype, None where it is not stated."""
    wide_norms: bool = False
    """True if norm weights are kept in float32 and multiply before the result is rounded (Gemma)."""
    embedding_scale: float = 1.0
    """Multiplies the embeddings; rounded to the model's dtype."""
    logits_scale: float = 1.0
    """Multiplies the logits."""
    logits_softcap: float | None = None
    """Logits are softcap · tanh(logit / softcap), after the scale; None = unchanged."""
    quantization: Quantization | None = None
    """The schemes of quantized weights; None = all are in the model's dtype."""

    @property
    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """The shapes of the layers with grouped-query attention, each once, in the order of the layers."""
        found = (layer.attention for layer in self.layers)
        return tuple(dict.fromkeys(each.shape for each in found if isinstance(each, GroupedQueryAttention)))

    @property
    def latent_shapes(self) -> tuple[LatentShape, ...]:
        """The shapes of the layers with latent attention, each once, in the order of the layers."""
        found = (layer.attention for layer in self.layers)
        return tuple(dict.fromkeys(each.shape for each in found if isinstance(each, LatentAttention)))

    @property
    def dense_widths(self) -> set[int]:
        """The inner sizes of the layers' feed-forward networks, without experts."""
        found = (layer.feed_forward for layer in self.layers)
        return {each.width for each in found if isinstance(each, DenseFeedForward)}

    @property
    def shared_widths(self) -> set[int]:
        """The inner sizes of the shared experts, which are dense networks."""
        found = (layer.feed_forward for layer in self.layers)
        return {each.shared_width for each in found if isinstance(each, MixtureOfExperts) and each.shared_width}

    @property
    def heads(self) -> int:
        """The largest number of query heads of a layer."""
        return max(layer.attention.shape.heads for layer in self.layers)
