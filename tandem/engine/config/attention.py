"""The shapes of attention and of state layers, for which the kernels are compiled."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The heads, scale and mask of grouped-query attention; kernels are compiled and tuned for each shape."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """The factor by which attention scores are multiplied."""
    window: int | None = None
    """The sliding window: the number of latest positions that a token attends to; None = all."""
    softcap: float | None = None
    """The cap of scores: softcap · tanh(score / softcap), applied after the scale; None = no cap."""
    rotary_dims: int | None = None
    """The number of leading dimensions of each head that RoPE rotates; None = all."""
    value_dim: int | None = None
    """The number of dimensions of values, if it differs from that of queries and keys; None = `head_dim`."""
    chunk: int | None = None
    """The length of the chunks that a context is divided into, from position 0; a token attends only to its own chunk.

    None = no chunks. A shape has no window if it has chunks.
    """

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """The numbers of rows of q, k and v in their stacked weight."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.v_dim

    @property
    def qkv_size(self) -> int:
        """The number of rows of the stacked q/k/v weight."""
        return sum(self.qkv_rows)

    @property
    def v_dim(self) -> int:
        """The number of dimensions of the values, and thus of the output, of each head."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def most_seen(self) -> int | None:
        """The maximum number of latest positions that a token attends to: the window, or a chunk; None = all."""
        return self.window if self.chunk is None else self.chunk

    @property
    def window_code(self) -> int:
        """The mask as one number for kernels: the window, minus the length of chunks, or 0 if there are neither."""
        return (self.window or 0) if self.chunk is None else -self.chunk

    def first_seen(self, position: int) -> int:
        """Return the first position that a token at `position` attends to."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(position - self.window + 1, 0)

    @property
    def output_size(self) -> int:
        """The number of elements of a token's output, before the output projection."""
        return self.heads * self.v_dim

    @property
    def rotated(self) -> int:
        """The number of dimensions of each head that RoPE rotates."""
        return self.head_dim if self.rotary_dims is None else self.rotary_dims


@dataclass(frozen=True, slots=True)
class IndexShape:
    """The indexer of sparse attention, which chooses what a token attends to (DeepSeek-V3.2, arXiv:2512.02556, 2.1).

    A cached token has one index key. With the index queries q_h and the weights w_h of a token, the score of a cached
    token is the sum over heads of w_h · max(q_h · key, 0). The token attends to the `top_k` tokens of highest score.
    """

    heads: int
    dim: int
    """The number of dimensions of an index key; RoPE rotates the first `LatentShape.rope` of them."""
    top_k: int


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Heads and dimensions of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    For each token the KV cache has `latent + rope` values, which all heads share: the normalized latent, then the
    rotated key; an indexer adds its key after them. A query has `nope` dimensions that are not rotated, then `rope`
    dimensions that are.
    """

    heads: int
    latent: int
    rope: int
    nope: int
    v_dim: int
    scale: float
    """The factor by which attention scores are multiplied; it includes YaRN's temperature."""
    index: IndexShape | None = None
    """The indexer of the layer; None = the layer has none."""

    @property
    def projected(self) -> int:
        """The number of rows of the KV down-projection: the latent, and the key that all heads share."""
        return self.latent + self.rope

    @property
    def cached(self) -> int:
        """The number of values per token in the KV cache."""
        return self.projected + (self.index.dim if self.index else 0)

    @property
    def query(self) -> int:
        """The number of dimensions of one query head."""
        return self.nope + self.rope


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape of the state that a layer keeps of a request instead of KV; its size does not depend on the tokens.

    It has `heads` parts of equal size, which are computed independently of each other: tensor parallelism divides them.
    """

    heads: int
    state: tuple[int, ...]
    """The shape of one head's recurrent state, which is kept in float32; empty if the layer has none (LFM2)."""
    channels: int
    """The number of channels of one head that pass through the short causal convolution."""
    inputs: int
    """The number of latest inputs that the convolution keeps of each channel, in the model's dtype: its width - 1."""
