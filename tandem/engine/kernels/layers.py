"""What a model's layers hand to kernels: prepared weights and their constants, made once when the model is loaded."""

from dataclasses import dataclass

from torch import Tensor

from tandem.engine.config.attention import AttentionShape, LatentShape
from tandem.engine.config.model import MixtureOfExperts
from tandem.engine.kernels.lora_tables import LoraTables
from tandem.engine.kernels.packed_weight import Weight


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm: its weight, of the model's dtype or float32, and the epsilon added to the mean of the squares."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [out, in], row-major, its bias [out] or None, and what adapters add to its product, if they do."""

    weight: Weight
    bias: Tensor | None = None
    adapters: LoraTables | None = None

    @property
    def matrix(self) -> Tensor:
        """The weight, for kernels whose `prepare` keeps none packed."""
        assert isinstance(self.weight, Tensor)
        return self.weight


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of a mixture of E experts with I inner elements; H is the hidden size, and gate rows come first."""

    router: Tensor
    """[E, H]."""
    router_bias: Tensor | None
    """[E]."""
    choice_bias: Tensor | None
    """[E] float32, see `ExpertRouter.choice_bias`."""
    gate_up: Weight
    """[E, 2·I, H]."""
    gate_up_bias: Tensor | None
    """[E, 2·I]."""
    down: Weight
    """[E, H, I]."""
    down_bias: Tensor | None
    """[E, H]."""
    shared_gate_up: Linear | None
    """The shared expert, as a dense network."""
    shared_down: Linear | None
    shared_gate: Tensor | None
    """[1, H]: the sigmoid of its product with the normed hidden state multiplies the shared expert's output."""
    tokens: Tensor | None = None
    """[E] int64, to which `Kernels.experts` adds the number of tokens that chose each expert; None = not counted."""

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """`gate_up` and `down`, for kernels whose `prepare_experts` keeps none packed."""
        assert isinstance(self.gate_up, Tensor)
        assert isinstance(self.down, Tensor)
        return self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Grouped-query attention of one layer between its q/k/v product and its output product."""

    index: int
    """The layer's index in the pages of its KV group."""
    shape: AttentionShape
    rope: Tensor
    """[max_context, shape.rotated] float32: cos of the first half of the dimensions, then sin, with scaling."""
    q_norm: Tensor | None = None
    """[head_dim] norms each head by itself, [heads·head_dim] the whole row."""
    k_norm: Tensor | None = None
    """Likewise, of the keys."""
    norm_eps: float = 0.0
    """The epsilon of both norms."""
    sinks: Tensor | None = None
    """[heads] float32: scores that take part in the softmax of every token and have no value."""


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """Latent attention of one layer between its down and its output products."""

    index: int
    """The layer's index in the pages of its KV group."""
    shape: LatentShape
    rope: Tensor
    """[max_context, shape.rope], as `AttentionLayer.rope`."""
    norm: Norm
    """[latent], of the latent."""
    kv_up: Tensor
    """[heads, nope + v_dim, latent]: computes each head's keys and values from the latents."""


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """The feed-forward network of one layer: its norm and its products, of which the first has the gate rows first."""

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
