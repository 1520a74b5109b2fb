"""Per-head RMSNorm of queries and keys, rotary embedding, and the store of keys and values, in one pass over q/k/v.

A program takes some tokens and a few heads of one kind. The loads of all its heads are issued before the first is used,
16 bytes each; a token's angles are loaded once for all of them, and values are copied unchanged.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.config.attention import AttentionShape
from engine.kernels.triton_launch import launch_dependents, wait_for_inputs

WARP_BYTES = 512
"""One 16-byte load of each thread: the tokens whose halves of a head this holds share a warp's load."""
TINY_TOKENS = 64
"""The largest step whose loads are a quarter as wide: the latency of its few programs counts, not their number."""
SMALL_TOKENS = 512
"""The largest step of programs of one warp and few heads: beyond it the GPU is saturated."""
SMALL_GROUP, LARGE_GROUP, LARGE_WARPS = 2, 4, 4


class Tile(NamedTuple):
    """The tile of a program: tokens, heads of one kind; and its warps."""

    tokens: int
    group: int
    warps: int


@lru_cache(maxsize=4096)
def plan_tile(tokens: int, shape: AttentionShape, item_bytes: int) -> Tile:
    """Returns the tile for a step of `tokens`; its group of heads divides both the query and the key heads."""
    together = max(WARP_BYTES // (triton.next_power_of_2(shape.head_dim // 2) * item_bytes), 1)
    if tokens <= TINY_TOKENS:
        return Tile(max(together // 4, 1), _group(shape, SMALL_GROUP), 1)
    if tokens <= SMALL_TOKENS:
        return Tile(together, _group(shape, SMALL_GROUP), 1)
    return Tile(together * LARGE_WARPS, _group(shape, LARGE_GROUP), LARGE_WARPS)


def _group(shape: AttentionShape, most: int) -> int:
    shared = math.gcd(shape.heads, shape.kv_heads)
    return next(size for size in range(most, 0, -1) if shared % size == 0)


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
    tile: Tile | None = None,
) -> Tensor:
    """Implements `Kernels.rope_and_store`: rotated queries stay in qkv, keys and values go to the cache.

    qkv       [T, (heads + 2·kv_heads)·head_dim] contiguous; its queries are overwritten
    rope      [max_context, head_dim] float32, cosines then sines; head_dim is even
    q_norm, k_norm [head_dim] or None
    cache     [pages, layers, 2, kv_heads, page_tokens, head_dim], its last dimension contiguous
    positions [T] int32, slots [T] int64 below 2³¹: a token of slot -1 (a padded row) is stored nowhere, its position
              unused and its query undefined
    tile      the plan's if None
    → q [T, heads, head_dim], a view into qkv. Arithmetic in float32, rounded once.
    """
    tokens, head_dim, all_heads = qkv.shape[0], shape.head_dim, shape.heads + 2 * shape.kv_heads
    if tile is None:
        tile = plan_tile(tokens, shape, qkv.element_size())
    page_stride, layer_stride, kind_stride, head_stride, token_stride, _ = cache.stride()
    _rope_and_store[(-(-tokens // tile.tokens), all_heads // tile.group)](
        qkv,
        rope,
        rope if q_norm is None else q_norm,
        rope if k_norm is None else k_norm,
        cache,
        positions,
        slots,
        tokens,
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
        TOKENS=tile.tokens,
        GROUP=tile.group,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
    return qkv.view(-1, all_heads, head_dim)[:, : shape.heads]


@triton.jit(do_not_specialize=["tokens", "layer"])
def _rope_and_store(
    qkv_ptr,
    rope_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cache_ptr,
    positions_ptr,
    slots_ptr,
    tokens,
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
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Processes TOKENS tokens and GROUP heads, all queries, all keys or all values."""
    HALF: tl.constexpr = HEAD_DIM // 2
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    # As wide as the tile: a row of one token would be loaded in another layout and moved through shared memory.
    column = tl.broadcast_to(tl.arange(0, HALF_BLOCK)[None, :], (TOKENS, HALF_BLOCK))
    head = tl.program_id(1) * GROUP
    real = token < tokens
    slot = tl.load(slots_ptr + token, mask=real, other=-1).to(tl.int32)
    position = tl.load(positions_ptr + token, mask=real, other=0).to(tl.int64)
    inside = real & (column < HALF)
    stored = (slot >= 0) & (column < HALF)
    at = qkv_ptr + token.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head * HEAD_DIM + column
    heads = ()
    for number in tl.static_range(GROUP):
        heads += (_load_halves(at + number * HEAD_DIM, HALF, inside),)  # type: ignore[assignment]
    # Loaded here, and not for values: inside the branches the load would wait for all heads.
    turned = stored & (head < HEADS + KV_HEADS)
    cos, sin = _load_halves(rope_ptr + position * HEAD_DIM + column, HALF, turned)
    page, offset = slot // PAGE_TOKENS, slot % PAGE_TOKENS
    kept = cache_ptr + layer.to(tl.int64) * layer_stride + page.to(tl.int64) * page_stride
    kept += offset * token_stride + column
    if head < HEADS:
        _store_rotated(heads, at, HEAD_DIM, inside, cos, sin, q_norm_ptr + column, eps, Q_NORMED, HEAD_DIM, GROUP)
    elif head < HEADS + KV_HEADS:
        kept += (head - HEADS) * head_stride
        _store_rotated(heads, kept, head_stride, stored, cos, sin, k_norm_ptr + column, eps, K_NORMED, HEAD_DIM, GROUP)
    else:
        kept += kind_stride + (head - HEADS - KV_HEADS) * head_stride
        for number in tl.static_range(GROUP):
            _store_halves(kept + number * head_stride, heads[number][0], heads[number][1], HALF, stored)


@triton.jit
def _store_rotated(
    heads,
    to,
    stride,
    mask,
    cos,
    sin,
    norm,
    eps,
    NORMED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Stores every head of `heads`, normed where NORMED and rotated, `stride` apart from `to` on."""
    HALF: tl.constexpr = HEAD_DIM // 2
    first_weight, second_weight = cos, sin
    if NORMED:
        first_weight, second_weight = _load_halves(norm, HALF, mask)
    for number in tl.static_range(GROUP):
        x, y = heads[number][0].to(tl.float32), heads[number][1].to(tl.float32)
        if NORMED:
            scale = tl.rsqrt(tl.sum(x * x + y * y, axis=1, keep_dims=True) / HEAD_DIM + eps)
            x, y = x * scale * first_weight.to(tl.float32), y * scale * second_weight.to(tl.float32)
        _store_halves(to + number * stride, x * cos - y * sin, y * cos + x * sin, HALF, mask)


@triton.jit
def _load_halves(at, HALF: tl.constexpr, mask):
    return tl.load(at, mask=mask, other=0.0), tl.load(at + HALF, mask=mask, other=0.0)


@triton.jit
def _store_halves(at, first, second, HALF: tl.constexpr, mask):
    dtype: tl.constexpr = at.dtype.element_ty
    tl.store(at, first.to(dtype), mask=mask)
    tl.store(at + HALF, second.to(dtype), mask=mask)
