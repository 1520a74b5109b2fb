"""The KV cache as passed to kernels: elements of the model's dtype, or 8-bit codes with scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.protocol.errors import Internal

SCALE_BYTES = 4
"""Size of a scale in bytes; each token has one scale per head for its key and one for its value."""
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest code of each dtype."""


@dataclass(frozen=True, slots=True)
class QuantizedKv:
    """A cache of 8-bit codes with one scale for each token, head, and key or value: value = code · scale.

    codes  [pages, layers, 2, kv_heads, page_tokens, head_dim] int8 or float8_e4m3fn, the last two dimensions contiguous
    scales [pages, layers, 2, kv_heads, page_tokens] float32

    In memory the scales of a head's `page_tokens` tokens follow their codes.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the codes."""
        return self.codes.shape


KvCache = Tensor | QuantizedKv
"""A cache [pages, layers, parts, kv_heads, page_tokens, head_dim]; the 2 parts are keys and values, 1 is latents."""


@dataclass(frozen=True, slots=True)
class StateCache:
    """The states of a group of state layers (`StateShape`): views of the same pages that other groups use for KV.

    states [pages, layers, heads, *state] float32; None if the layers have no recurrent state
    inputs [pages, layers, heads, channels, inputs] model dtype: the latest inputs of the convolution, the oldest first

    The state in a page is that after the last computed token whose position lies in the page.
    """

    states: Tensor | None
    inputs: Tensor


GroupCache = KvCache | StateCache
"""The view that the layers of a group have of the pages."""


def is_quantized(dtype: torch.dtype) -> bool:
    """Return True if a cache of this dtype holds codes with scales."""
    return dtype in _LARGEST


def kv_of(cache: GroupCache) -> KvCache:
    """Return the cache of a layer with KV. Raises Internal if it has states."""
    if isinstance(cache, StateCache):
        raise Internal("The pages of state layers have no keys and values.")
    return cache


def states_of(cache: GroupCache) -> StateCache:
    """Return the cache of a state layer. Raises Internal if it has keys and values."""
    if not isinstance(cache, StateCache):
        raise Internal("The pages of attention have no states.")
    return cache


def unquantized(cache: GroupCache) -> Tensor:
    """Return the cache for kernels that support no 8-bit KV. Raises Internal if it is quantized, or has states."""
    if isinstance(held := kv_of(cache), QuantizedKv):
        raise Internal("These kernels do not compute with 8-bit keys and values.")
    return held


def codes_of(cache: KvCache) -> Tensor:
    """Return the codes of a quantized cache, or the elements of a cache that is not quantized."""
    return cache.codes if isinstance(cache, QuantizedKv) else cache


def quantize_kv(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes [..., head_dim] of `dtype` and float32 scales [...] for values [..., head_dim].

    scale = max |value| / largest code; codes are value · (largest code / max |value|), rounded to nearest, ties to
    even. Values that are all zero have the scale 0.
    """
    wide = values.to(torch.float32)
    most = wide.abs().amax(-1, keepdim=True)
    # A tensor, because PyTorch would replace a division by a Python number by a product with its reciprocal.
    largest = torch.full_like(most, _LARGEST[dtype])
    codes = wide * torch.where(most == 0, 0.0, largest / most)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), (most / largest).squeeze(-1)


def dequantize_kv(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values [..., head_dim] of the codes, computed in float32 and rounded to `dtype`."""
    return (codes.to(torch.float32) * scales.unsqueeze(-1)).to(dtype)
