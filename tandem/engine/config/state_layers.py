"""The layers that keep a state of fixed size for each request, in place of attention."""

from dataclasses import dataclass

from tandem.engine.config.attention import StateShape


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


StateLayer = GatedDeltaNet | KimiDeltaAttention | Mamba2 | ShortConvolution
"""The kinds of layers that keep a state instead of keys and values, in place of attention."""
