"""The spec of a model: what each layer computes, in terms that do not depend on the model's family.

The module of a family (`tandem/engine/models/families/`) creates the spec from config.json. The decoder, its
parameters, the KV cache, the roofline, the planner and the simulation read only the spec, and do not know the family.
"""

from dataclasses import dataclass, replace

from tandem.engine.config.attention import AttentionShape, LatentShape, StateShape
from tandem.engine.config.quantization import Quantization
from tandem.engine.config.rope import RopeConfig


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
class GatedDeltaNet:
    """Gated DeltaNet (arXiv:2412.06464): the delta rule with one decay per value head and token.

    Each key head is shared by `value_heads / key_heads` value heads. With the key k, the value v, the decay a and the
    step size b of a token, a head's state S [key_dim, value_dim] becomes a·S + k (b·(v - a·Sᵀk))ᵀ.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """The width of the short causal convolution of queries, keys and values, in tokens."""
    norm_eps: float
    step_scale: float = 1.0
    """The factor by which the step size, a sigmoid, is multiplied: 2 allows negative eigenvalues (OLMo hybrid)."""

    @property
    def state(self) -> StateShape:
        """The shape of a request's state; each of its heads is a key head with the value heads that share it."""
        shared = self.value_heads // self.key_heads
        return StateShape(self.key_heads, (shared, self.key_dim, self.value_dim), sum(self.convolved), self.width - 1)

    @property
    def convolved(self) -> tuple[int, ...]:
        """The numbers of channels of query, key and values of one key head."""
        return self.key_dim, self.key_dim, self.value_heads // self.key_heads * self.value_dim

    @property
    def inner(self) -> int:
        """The number of elements of the layer's output before the output projection."""
        return self.value_heads * self.value_dim

    @property
    def projected(self) -> tuple[int, ...]:
        """The numbers of rows of the input projections: q, k, v, output gate, step size and decay."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.inner, self.inner, self.value_heads, self.value_heads


@dataclass(frozen=True, slots=True)
class KimiDeltaAttention:
    """Kimi Delta Attention (arXiv:2510.26692): the delta rule with one decay per key channel and token.

    With the key k, the value v, the decays a and the step size b of a token, a head's state S [head_dim, head_dim]
    becomes S' + k (b·(v - S'ᵀk))ᵀ with S' = diag(a)·S. Decays and output gate are products of two matrices of `rank`.
    """

    heads: int
    head_dim: int
    rank: int
    width: int
    """The width of the short causal convolution of queries, keys and values, in tokens."""
    norm_eps: float

    @property
    def state(self) -> StateShape:
        """The shape of a request's state."""
        return StateShape(self.heads, (1, self.head_dim, self.head_dim), sum(self.convolved), self.width - 1)

    @property
    def convolved(self) -> tuple[int, ...]:
        """The numbers of channels of query, key and value of one head."""
        return self.head_dim, self.head_dim, self.head_dim

    @property
    def inner(self) -> int:
        """The number of elements of the layer's output before the output projection."""
        return self.heads * self.head_dim

    @property
    def projected(self) -> tuple[int, ...]:
        """The numbers of elements that the state layer takes: q, k, v, output gate, step size and decays."""
        return self.inner, self.inner, self.inner, self.inner, self.heads, self.inner

    @property
    def input_rows(self) -> tuple[int, ...]:
        """The numbers of rows of the input projections: q, k, v, step size, and the first products of decay and gate.

        Ranks divide those of heads; each has the first products as a whole.
        """
        return self.inner, self.inner, self.inner, self.heads, self.rank, self.rank


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Mamba-2 (arXiv:2405.21060): a state per head that decays by one factor per head and token.

    The heads of a group share the input and output vectors B and C. With the decay a = exp(-exp(A_log)·dt), a head's
    state S [state_dim, head_dim] becomes a·S + B (dt·x)ᵀ, and its output is Sᵀ·C + D·x.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    width: int
    """The width of the short causal convolution of x, B and C, in tokens."""
    norm_eps: float
    norm_groups: int = 1
    """The number of parts of the gated output that RMSNorm normalizes separately."""
    convolution_bias: bool = True
    bias: bool = False
    """True if the input and output projections have biases."""
    least_step: float = 0.0
    """The minimum of dt, after softplus."""

    @property
    def state(self) -> StateShape:
        """The shape of a request's state; each of its heads is a group of heads that share keys and queries."""
        state = (self.heads // self.groups, self.state_dim, self.head_dim)
        return StateShape(self.groups, state, sum(self.convolved), self.width - 1)

    @property
    def convolved(self) -> tuple[int, ...]:
        """The numbers of channels of x, B and C of one group."""
        return self.inner // self.groups, self.state_dim, self.state_dim

    @property
    def inner(self) -> int:
        """The number of elements of the layer's output before the output projection."""
        return self.heads * self.head_dim

    @property
    def projected(self) -> tuple[int, ...]:
        """The numbers of rows of the input projection: output gate, x, B, C and dt."""
        shared = self.groups * self.state_dim
        return self.inner, self.inner, shared, shared, self.heads


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """The gated short convolution of LFM2: C · convolution(B · x), with B, C and x projected from the input."""

    channels: int
    width: int
    """The width of the causal convolution, in tokens."""
    blocks: int
    """The number of blocks of channels, which tensor parallelism divides among ranks."""
    bias: bool = False
    """True if the projections and the convolution have biases."""

    @property
    def state(self) -> StateShape:
        """The shape of a request's state, which is only the latest inputs of the convolution."""
        return StateShape(self.blocks, (), self.channels // self.blocks, self.width - 1)

    @property
    def convolved(self) -> tuple[int, ...]:
        """The number of channels of one block."""
        return (self.channels // self.blocks,)

    @property
    def inner(self) -> int:
        """The number of elements of the layer's output before the output projection."""
        return self.channels

    @property
    def projected(self) -> tuple[int, ...]:
        """The numbers of rows of the input projection: B, C and x."""
        return self.channels, self.channels, self.channels


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


StateLayer = GatedDeltaNet | KimiDeltaAttention | Mamba2 | ShortConvolution
"""The kinds of layers that keep a state instead of keys and values, in place of attention."""
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
