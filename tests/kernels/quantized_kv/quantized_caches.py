"""Quantized copies of the caches of `steps.py`, in the memory layout of a `PagedCache`."""

import torch
from torch import Tensor

from tandem.engine.kernels.kv_cache import SCALE_BYTES, QuantizedKv, quantize_kv


def quantized(cache: Tensor, dtype: torch.dtype = torch.int8) -> QuantizedKv:
    """Returns a cache [pages, layers, parts, kv_heads, page_tokens, head_dim] as codes and scales.

    In memory heads are outermost, and the scales of a page's tokens follow their codes. Memory that was never written
    has a scale of NaN.
    """
    pages, layers, parts, heads, page_tokens, head_dim = cache.shape
    plane = page_tokens * (head_dim + SCALE_BYTES)
    memory = torch.zeros(pages, heads, layers, parts, plane, dtype=dtype).permute(0, 2, 3, 1, 4)
    codes, scales = memory.tensor_split([page_tokens * head_dim], dim=-1)
    stored = QuantizedKv(codes.view(pages, layers, parts, heads, page_tokens, head_dim), scales.view(torch.float32))
    new_codes, new_scales = quantize_kv(cache.nan_to_num(), dtype)
    stored.codes.copy_(new_codes)
    stored.scales.copy_(torch.where(cache.isnan().any(-1), float("nan"), new_scales))
    return stored


def moved(cache: QuantizedKv, device: torch.device) -> QuantizedKv:
    """Returns the cache on `device`, in memory as before."""
    if cache.codes.device == device:
        return cache
    pages, layers, parts, heads, page_tokens, head_dim = cache.codes.shape
    plane = page_tokens * (head_dim + SCALE_BYTES)
    memory = torch.empty(pages, heads, layers, parts, plane, dtype=cache.codes.dtype, device=device)
    codes, scales = memory.permute(0, 2, 3, 1, 4).tensor_split([page_tokens * head_dim], dim=-1)
    copy = QuantizedKv(codes.view(cache.codes.shape), scales.view(torch.float32))
    copy.codes.copy_(cache.codes)
    copy.scales.copy_(cache.scales)
    return copy
