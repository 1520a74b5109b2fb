"""The KV cache as passed to kernels: elements of the model's dtype, or 8-bit codes with scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.protocol.errors import Internal

SCALE_BYTES = 4
"""Size of a scale in bytes; a token has one per head for its key and one for its value, or one for its latent."""
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest code of each dtype."""


@dataclass(frozen=True, slots=True)
class QuantizedKv:
    """A cache of 8-bit codes with one scale for each token, head, and key, value or latent: value = code · scale.

    codes  [pages, layers, parts, kv_heads, page_tokens, head_dim] int8 or float8_e4m3fn, the last two dimensions
           contiguous
    scales [pages, layers, parts, kv_heads, page_tokens] float32

    In memory the scales of a head's `page_tokens` tokens follow their codes.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the codes."""
        return self.codes.shape


@dataclass(frozen=True, slots=True)
class UnequalKv:
    """A cache whose parts, keys and values, have different numbers of dimensions: one cache of a single part for each.

    In memory the parts of a head follow one another, each laid out like a part of other caches.
    """

    parts: tuple[Tensor | QuantizedKv, ...]
    """[pages, layers, 1, kv_heads, page_tokens, dim] each."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the first part."""
        return self.parts[0].shape


KvCache = Tensor | QuantizedKv | UnequalKv
"""A cache [pages, layers, parts, kv_heads, page_tokens, head_dim]; the 2 parts are keys and values, 1 is latents."""

LatentCache = Tensor | QuantizedKv
"""A cache of latents [pages, layers, 1, 1, page_tokens, latent + rope]; a token has one scale for all its elements."""


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


def latents_of(cache: GroupCache) -> LatentCache:
    """Return the cache of a layer with latents. Raises Internal if it has states, or parts of different dimensions."""
    if isinstance(held := kv_of(cache), UnequalKv):
        raise Internal("Latents have a single part.")
    return held


def unquantized(cache: GroupCache) -> Tensor:
    """Return the cache for kernels that support no 8-bit KV. Raises Internal if it is quantized, or has states."""
    if not isinstance(held := kv_of(cache), Tensor):
        raise Internal("These kernels do not compute with 8-bit keys and values, or with values of other dimensions.")
    return held


def kv_view(planes: Tensor, dims: tuple[int, ...], page_tokens: int) -> KvCache:
    """Return `planes` [pages, layers, heads, elements] as a cache; its parts have `dims` dimensions."""
    if len(set(dims)) == 1:
        return _parts_view(planes, len(dims), page_tokens, dims[0])
    scales = SCALE_BYTES if is_quantized(planes.dtype) else 0
    split = planes.split_with_sizes([page_tokens * (dim + scales) for dim in dims], dim=-1)
    return UnequalKv(tuple(_parts_view(part, 1, page_tokens, dim) for part, dim in zip(split, dims, strict=True)))


def _parts_view(planes: Tensor, parts: int, page_tokens: int, dim: int) -> Tensor | QuantizedKv:
    """Return `planes` as the view of `parts` parts of `dim` dimensions."""
    planes = torch.unflatten(planes, -1, (parts, -1)).transpose(2, 3)
    if not is_quantized(planes.dtype):
        return torch.unflatten(planes, -1, (page_tokens, dim))
    codes, scales = planes.tensor_split([page_tokens * dim], dim=-1)
    return QuantizedKv(torch.unflatten(codes, -1, (page_tokens, dim)), scales.view(torch.float32))


def codes_of(cache: KvCache) -> Tensor:
    """Return the codes of a quantized cache, or the elements of a cache that is not quantized.

    If the parts have different numbers of dimensions, only those of the first part, the keys, are returned.
    """
    if isinstance(cache, UnequalKv):
        cache = cache.parts[0]
    return cache.codes if isinstance(cache, QuantizedKv) else cache


def part_stride(cache: KvCache) -> int:
    """Return the distance from a head's keys to its values in memory, in elements."""
    if isinstance(cache, UnequalKv):
        keys, values = map(codes_of, cache.parts)
        return int(values.storage_offset() - keys.storage_offset())
    return codes_of(cache).stride(2)


def value_dim(cache: KvCache) -> int:
    """Return the number of dimensions of the values."""
    values = cache.parts[1] if isinstance(cache, UnequalKv) else cache
    return int(values.shape[5])


def layer_part(cache: KvCache, layer: int, part: int) -> Tensor | QuantizedKv:
    """Return the view [pages, kv_heads, page_tokens, dim] of one layer's keys (`part` 0) or values (1)."""
    if isinstance(cache, UnequalKv):
        cache, part = cache.parts[part], 0
    if isinstance(cache, QuantizedKv):
        return QuantizedKv(cache.codes[:, layer, part], cache.scales[:, layer, part])
    return cache[:, layer, part]


def has_codes(cache: KvCache) -> bool:
    """Return True if the cache holds codes with scales."""
    return is_quantized(codes_of(cache).dtype)


def largest_code(cache: KvCache) -> float:
    """Return the largest code of the cache's dtype; 0 if the cache holds no codes."""
    return _LARGEST.get(codes_of(cache).dtype, 0.0)


def tensors_of(cache: KvCache) -> tuple[Tensor, ...]:
    """Return all tensors of a cache."""
    if isinstance(cache, UnequalKv):
        return tuple(tensor for part in cache.parts for tensor in tensors_of(part))
    return (cache.codes, cache.scales) if isinstance(cache, QuantizedKv) else (cache,)


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
