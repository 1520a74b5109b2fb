"""The weights and constants of a layer, prepared when the model is loaded and passed to its kernels."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from tandem.engine.config.attention import AttentionShape, LatentShape
from tandem.engine.config.model import MixtureOfExperts
from tandem.engine.config.state_layers import StateLayer
from tandem.engine.kernels.lora_tables import LoraTables
from tandem.engine.kernels.packed_weight import Weight


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm: its weight, in the model's dtype or float32, and the epsilon added to the mean of the squares."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A LayerNorm: its weight and bias [H] or None, and the epsilon added to the variance."""

    weight: Tensor
    bias: Tensor | None
    eps: float


InputNorm = Norm | LayerNorm | None
"""The norm of a product's input; None = the input is not normalized."""


@dataclass(frozen=True, slots=True)
class Linear:
    """The weight [out, in] of a linear layer, row-major, its bias [out] or None, and the LoRA tables or None."""

    weight: Weight
    bias: Tensor | None = None
    adapters: LoraTables | None = None

    @property
    def matrix(self) -> Tensor:
        """The weight as a tensor, for kernels whose `prepare` leaves no weight packed."""
        assert isinstance(self.weight, Tensor)
        return self.weight


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of a mixture of E experts with intermediate size I; H is the hidden size.

    In stacked gate and up matrices the rows of the gate come first.
    """

    router: Tensor
    """[E, H]: the router's product gives the logits of the experts."""
    router_bias: Tensor | None
    """[E], added to the router's logits."""
    choice_bias: Tensor | None
    """[E] float32, added to the scores for the choice of experts only, see `ExpertRouter.choice_bias`."""
    gate_up: Weight
    """[E, 2·I, H]: the first product of each expert, gate rows first; [E, I, H] if the experts have no gate."""
    gate_up_bias: Tensor | None
    """[E, 2·I] or [E, I], the bias of `gate_up`."""
    down: Weight
    """[E, H, I]: the second product of each expert."""
    down_bias: Tensor | None
    """[E, H], the bias of `down`."""
    shared_gate_up: Linear | None
    """The first product of the shared expert, a dense network that every token passes; None = no shared expert."""
    shared_down: Linear | None
    """The second product of the shared expert."""
    shared_gate: Tensor | None
    """[1, H]: scales the shared expert's output by sigmoid(normed hidden state · shared_gateᵀ); None = no scaling."""
    router_norm: Tensor | None = None
    """[H], the weight of the norm of the router's input; None = it is the input of the experts."""
    expert_scales: Tensor | None = None
    """[E] float32, multiplied with the weights of the chosen experts, see `ExpertRouter.expert_scales`."""
    latent_down: Linear | None = None
    """[L, H], computes the experts' inputs from the normed hidden states; None = those are the inputs.

    With it, `gate_up` is [E, 2·I, L] or [E, I, L], `down` [E, L, I], and `down_bias` [E, L].
    """
    latent_up: Linear | None = None
    """[H, L], computes the layer's output from the sum of the experts' outputs; None as `latent_down`."""
    tokens: Tensor | None = None
    """[E] int64: `Kernels.experts` adds the number of tokens that chose each expert; None = tokens are not counted."""

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """`gate_up` and `down` as tensors, for kernels whose `prepare_experts` leaves no weight packed."""
        assert isinstance(self.gate_up, Tensor)
        assert isinstance(self.down, Tensor)
        return self.gate_up, self.down


def with_linears(experts: Experts, prepare: Callable[[Linear], Linear]) -> Experts:
    """Return the experts with `prepare` applied to each linear layer that all tokens pass."""
    shared_gate_up, shared_down, latent_down, latent_up = (
        None if linear is None else prepare(linear)
        for linear in (experts.shared_gate_up, experts.shared_down, experts.latent_down, experts.latent_up)
    )
    return replace(
        experts,
        shared_gate_up=shared_gate_up,
        shared_down=shared_down,
        latent_down=latent_down,
        latent_up=latent_up,
    )


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The grouped-query attention of one layer, between its q/k/v product and its output product."""

    index: int
    """The layer's index in the pages of its KV group."""
    shape: AttentionShape
    rope: Tensor
    """[max_context, shape.rotated] float32: per position the cosines, then the sines of `shape.rotated` / 2 angles.

    The scaling of the rotary embedding is included.
    """
    q_norm: Tensor | None = None
    """The weight of the norm of q: [head_dim] to norm each head separately, [heads·head_dim] to norm the whole row."""
    k_norm: Tensor | None = None
    """The weight of the norm of k, [head_dim] or [kv_heads·head_dim], as for q."""
    norm_eps: float = 0.0
    """The epsilon of both norms."""
    sinks: Tensor | None = None
    """[heads] float32: a score per head that takes part in every token's softmax and has no value; None = no sinks."""


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """The latent attention of one layer, between its down products and its output product."""

    index: int
    """The layer's index in the pages of its KV group."""
    shape: LatentShape
    rope: Tensor
    """[max_context, shape.rope], as in `AttentionLayer.rope`."""
    norm: Norm
    """[latent], the norm of the latent."""
    kv_up: Tensor
    """[heads, nope + v_dim, latent]: multiplied with the latents it gives each head's keys and values."""
    index_norm: LayerNorm | None = None
    """[index.dim], the norm of index keys; None if the layer has no indexer."""


class IndexQueries(NamedTuple):
    """The inputs of an indexer's choice for the step's tokens (`IndexShape`)."""

    q: Tensor
    """[T, index.heads, index.dim], rotated."""
    weights: Tensor
    """[T, index.heads]: the weight of each head in the score."""


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """A state layer, between its input projections and its output projection."""

    index: int
    """The layer's index in the pages of its group."""
    spec: StateLayer
    convolution: Tensor
    """[heads · channels, width]: the convolution's weight, in the order of `spec.convolved`, the oldest token first."""
    convolution_bias: Tensor | None
    decay_log: Tensor | None
    """[heads] float32: the logarithm of each head's rate of decay (A_log); None without a recurrent state."""
    step_bias: Tensor | None
    """[heads] float32: the bias of dt, or [inner] for Kimi Delta Attention; None without a recurrent state."""
    skip: Tensor | None
    """[heads] float32: the factor with which a head's input is added to its output (D of Mamba-2)."""
    norm: Norm | None
    """The norm of the output: [value_dim] for each head, or [inner] for Mamba-2; None without one."""


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """The feed-forward network of one layer: its norm and its two products; the first one has the gate rows first."""

    norm: Norm
    gate_up: Linear
    down: Linear
    activation: str = "silu"
    """One of `DenseFeedForward.activation`."""


@dataclass(frozen=True, slots=True)
class ExpertsLayer:
    """The mixture of experts of one layer, and the norm before it."""

    norm: Norm
    experts: Experts
    spec: MixtureOfExperts
