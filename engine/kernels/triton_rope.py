"""Per-head RMSNorm of queries and keys, rotary embedding, and the store of keys and values, in one pass over q/k/v."""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.base import AttentionShape
from engine.kernels.triton_launch import launch_dependents, wait_for_inputs

TILE_ELEMENTS = 2048
"""A program takes a token and as many heads as this many elements hold."""
ELEMENTS_PER_WARP = 512
"""One 16-byte load of a half-precision type for each thread and half of a head."""


def rope_and_store(
    qkv: Tensor,
    rope: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cache: Tensor,
    layer: int,
    positions: Tensor,
    slots: Tensor,
    shape: AttentionShape,
    *,
    pdl: bool,
) -> Tensor:
    """`Kernels.rope_and_store`: rotated queries stay in qkv, keys and values go to the cache.

    qkv       [T, (heads + 2·kv_heads)·head_dim] contiguous, overwritten where its queries are
    rope      [max_context, head_dim] float32, cosines then sines; head_dim is even
    q_norm, k_norm [head_dim] or None
    cache     [pages, layers, 2, kv_heads, page_tokens, head_dim], its last dimension contiguous
    positions [T] int32, slots [T] int64: a token of slot -1 (a padded row) is stored nowhere, its position unused
    → q [T, heads, head_dim], a view into qkv. Arithmetic in float32, rounded once.
    """
    head_dim, all_heads = shape.head_dim, shape.heads + 2 * shape.kv_heads
    half_block = triton.next_power_of_2(head_dim // 2)
    head_block = min(max(TILE_ELEMENTS // (2 * half_block), 1), triton.next_power_of_2(all_heads))
    page_stride, layer_stride, kind_stride, head_stride, token_stride, _ = cache.stride()
    _rope_and_store[(qkv.shape[0], triton.cdiv(all_heads, head_block))](
        qkv,
        rope,
        rope if q_norm is None else q_norm,
        rope if k_norm is None else k_norm,
        cache,
        positions,
        slots,
        eps,
        layer,
        page_stride,
        layer_stride,
        kind_stride,
        head_stride,
        token_stride,
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        HEAD_DIM=head_dim,
        PAGE_TOKENS=cache.shape[4],
        Q_NORMED=q_norm is not None,
        K_NORMED=k_norm is not None,
        HEAD_BLOCK=head_block,
        HALF_BLOCK=half_block,
        PDL=pdl,
        num_warps=max(2 * head_block * half_block // ELEMENTS_PER_WARP, 1),
        launch_pdl=pdl,
    )
    return qkv.view(-1, all_heads, head_dim)[:, : shape.heads]


@triton.jit(do_not_specialize=["layer"])
def _rope_and_store(
    qkv_ptr,
    rope_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cache_ptr,
    positions_ptr,
    slots_ptr,
    eps,
    layer,
    page_stride,
    layer_stride,
    kind_stride,
    head_stride,
    token_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    Q_NORMED: tl.constexpr,
    K_NORMED: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token and HEAD_BLOCK of its heads; queries, keys and values may share a program."""
    HALF: tl.constexpr = HEAD_DIM // 2
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    position = tl.load(positions_ptr + token).to(tl.int64)
    position = tl.where(slot >= 0, position, 0)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    column = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = column < HALF
    inside = (head < HEADS + 2 * KV_HEADS) & in_half
    at = qkv_ptr + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head * HEAD_DIM + column
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    x, y = first, second
    if Q_NORMED or K_NORMED:
        scale = tl.rsqrt((tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / HEAD_DIM + eps)[:, None]
    if Q_NORMED:
        q_first = tl.load(q_norm_ptr + column, mask=in_half, other=0.0).to(tl.float32)
        q_second = tl.load(q_norm_ptr + HALF + column, mask=in_half, other=0.0).to(tl.float32)
        x = tl.where(is_query, first * scale * q_first, x)
        y = tl.where(is_query, second * scale * q_second, y)
    if K_NORMED:
        k_first = tl.load(k_norm_ptr + column, mask=in_half, other=0.0).to(tl.float32)
        k_second = tl.load(k_norm_ptr + HALF + column, mask=in_half, other=0.0).to(tl.float32)
        x = tl.where(is_query, x, first * scale * k_first)
        y = tl.where(is_query, y, second * scale * k_second)
    angle = rope_ptr + position * HEAD_DIM + column
    cos = tl.load(angle, mask=in_half, other=0.0)
    sin = tl.load(angle + HALF, mask=in_half, other=0.0)
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    out_first = tl.where(is_value, first, x * cos - y * sin).to(dtype)
    out_second = tl.where(is_value, second, y * cos + x * sin).to(dtype)
    tl.store(at, out_first, mask=inside & is_query)
    tl.store(at + HALF, out_second, mask=inside & is_query)

    stored = inside & (head >= HEADS) & (slot >= 0)
    kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
    page = tl.where(slot >= 0, slot // PAGE_TOKENS, 0)
    offset = tl.where(slot >= 0, slot % PAGE_TOKENS, 0)
    place = cache_ptr + page * page_stride + layer.to(tl.int64) * layer_stride + offset * token_stride
    kept = place + tl.where(is_value, kind_stride, 0) + kv_head * head_stride + column
    tl.store(kept, out_first.to(cache_ptr.dtype.element_ty), mask=stored)
    tl.store(kept + HALF, out_second.to(cache_ptr.dtype.element_ty), mask=stored)
