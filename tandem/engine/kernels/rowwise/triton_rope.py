"""RMSNorm of queries and keys, rotary embedding, and the store of keys and values, in one pass over q/k/v.

Either each head is normed separately, or all heads of a token together. In the latter case an earlier launch computes
the scales, because a program sees only a few heads. A program takes some tokens and a few heads, which are all queries,
all keys or all values. It issues the loads of all its heads, 16 bytes each, before it uses the first one, and loads a
token's angles once for all heads. Values are copied unchanged; if the cache is quantized, keys and values are
quantized.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import KvCache, codes_of, part_stride
from tandem.engine.kernels.layers import AttentionLayer
from tandem.engine.kernels.rowwise.triton_codes import store_head
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs

WARP_BYTES = 512
"""Number of bytes that the threads of a warp load at once, 16 bytes each.

Tokens whose half heads fit together into these bytes share a load.
"""
TINY_TOKENS = 64
"""Maximum number of tokens of a step with loads of a quarter of the width: few programs are limited by latency."""
SMALL_TOKENS = 512
"""Maximum number of tokens of a step whose programs have one warp and few heads; larger steps saturate the GPU."""
SMALL_GROUP, LARGE_GROUP, LARGE_WARPS = 2, 4, 4


class Tile(NamedTuple):
    """The tile of a program: its number of tokens, of heads of one kind, and of warps."""

    tokens: int
    group: int
    warps: int


@lru_cache(maxsize=4096)
def plan_tile(tokens: int, shape: AttentionShape, item_bytes: int) -> Tile:
    """Return the tile for a step of `tokens` tokens; its number of heads divides both the query and the key heads."""
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
    layer: AttentionLayer,
    cache: KvCache,
    layout: StepLayout,
    *,
    pdl: bool,
    tile: Tile | None = None,
) -> Tensor:
    """Compute `Kernels.rope_and_store`: rotated queries stay in qkv, keys and values go to the cache.

    qkv       [T, (heads + kv_heads)·head_dim + kv_heads·v_dim] contiguous; its queries are overwritten
    layer     its norms may have any dtype; head_dim, v_dim and the number of rotated dimensions are even
    cache     [pages, layers, 2, kv_heads, page_tokens, head_dim], its last dimension contiguous, or the last two if it
              is a `QuantizedKv` or an `UnequalKv`
    layout    its slots are below 2³¹: a token with slot -1 (a padding row) is not stored, its position is not used, and
              its query is undefined
    tile      None = that of `plan_tile`
    → q [T, heads, head_dim], a view into qkv. Arithmetic is float32, rounded once; then keys and values are quantized.
    """
    shape, rope, q_norm, k_norm = layer.shape, layer.rope, layer.q_norm, layer.k_norm
    tokens, head_dim, all_heads = qkv.shape[0], shape.head_dim, shape.heads + 2 * shape.kv_heads
    if tile is None:
        tile = plan_tile(tokens, shape, qkv.element_size())
    held = codes_of(cache)
    page_stride, layer_stride, _, head_stride, token_stride, _ = held.stride()
    whole_rows = _norms_rows(q_norm, shape) or _norms_rows(k_norm, shape)
    scales = _row_scales(qkv, layer.norm_eps, shape, pdl=pdl) if whole_rows else rope
    _rope_and_store[(-(-tokens // tile.tokens), all_heads // tile.group)](
        qkv,
        rope,
        rope if q_norm is None else q_norm,
        rope if k_norm is None else k_norm,
        scales,
        held,
        layout.positions,
        layout.slots,
        tokens,
        layer.norm_eps,
        layer.index,
        page_stride,
        layer_stride,
        part_stride(cache),
        head_stride,
        token_stride,
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=shape.v_dim,
        ROTATED=rope.shape[1],
        WHOLE_ROWS=whole_rows,
        PAGE_TOKENS=held.shape[4],
        Q_NORMED=q_norm is not None,
        K_NORMED=k_norm is not None,
        TOKENS=tile.tokens,
        GROUP=tile.group,
        HALF_BLOCK=triton.next_power_of_2(max(head_dim, shape.v_dim) // 2),
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
    return qkv[:, : shape.qkv_rows[0]].view(tokens, shape.heads, head_dim)


def _norms_rows(norm: Tensor | None, shape: AttentionShape) -> bool:
    """Return True if the norm applies to whole rows, and a row has several heads."""
    return norm is not None and norm.numel() > shape.head_dim


def _row_scales(qkv: Tensor, eps: float, shape: AttentionShape, *, pdl: bool) -> Tensor:
    """Return 1 / sqrt(mean(x²) + eps) of the queries and of the keys of each token: [T, 2] float32."""
    tokens = qkv.shape[0]
    scales = torch.empty(tokens, 2, dtype=torch.float32, device=qkv.device)
    _scale_rows[(tokens, 2)](
        qkv,
        scales,
        eps,
        QUERY=shape.qkv_rows[0],
        KEY=shape.qkv_rows[1],
        VALUE=shape.qkv_rows[2],
        BLOCK=triton.next_power_of_2(shape.heads * shape.head_dim),
        PDL=pdl,
        num_warps=LARGE_WARPS,
        launch_pdl=pdl,
    )
    return scales


@triton.jit
def _scale_rows(
    qkv_ptr,
    scales_ptr,
    eps,
    QUERY: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, 0 for queries or 1 for keys) computes the scale of one row."""
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    width = tl.where(kind == 0, QUERY, KEY)
    row = qkv_ptr + token * (QUERY + KEY + VALUE) + kind * QUERY
    x = tl.load(row + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(scales_ptr + 2 * token + kind, tl.rsqrt(tl.sum(x * x, axis=0) / width + eps))


@triton.jit(do_not_specialize=["tokens", "layer"])
def _rope_and_store(
    qkv_ptr,
    rope_ptr,
    q_norm_ptr,
    k_norm_ptr,
    scales_ptr,
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
    VALUE_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    Q_NORMED: tl.constexpr,
    K_NORMED: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tokens, heads) processes TOKENS tokens and GROUP heads, which are all queries, all keys or all values.

    Lane i of a tile holds two numbers of a head: the pair (i, i + ROTATED / 2) that is rotated, or, from lane ROTATED /
    2 on, two numbers that are not rotated.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    TURNED: tl.constexpr = ROTATED // 2
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    # Broadcast to the whole tile: lanes of one row would be loaded in another layout and moved through shared memory.
    lane = tl.broadcast_to(tl.arange(0, HALF_BLOCK)[None, :], (TOKENS, HALF_BLOCK))
    head = tl.program_id(1) * GROUP
    real = token < tokens
    slot = tl.load(slots_ptr + token, mask=real, other=-1).to(tl.int32)
    position = tl.load(positions_ptr + token, mask=real, other=0).to(tl.int64)
    inside = real & (lane < HALF)
    stored = (slot >= 0) & (lane < HALF)
    if ROTATED == HEAD_DIM:
        column = lane
        gap = HALF
    else:
        column = tl.where(lane < TURNED, lane, lane + TURNED)
        gap = tl.where(lane < TURNED, TURNED, HALF - TURNED)
    WIDTH: tl.constexpr = (HEADS + KV_HEADS) * HEAD_DIM + KV_HEADS * VALUE_DIM
    at = qkv_ptr + token.to(tl.int64) * WIDTH + head * HEAD_DIM + column
    apart = HEAD_DIM
    if VALUE_DIM != HEAD_DIM:
        is_value = head >= HEADS + KV_HEADS
        lanes = tl.where(is_value, VALUE_DIM // 2, HALF)
        inside, stored = real & (lane < lanes), (slot >= 0) & (lane < lanes)
        column, gap = tl.where(is_value, lane, column), tl.where(is_value, VALUE_DIM // 2, gap)
        apart = tl.where(is_value, VALUE_DIM, HEAD_DIM)
        earlier_values = tl.maximum(head - HEADS - KV_HEADS, 0)
        at = qkv_ptr + token.to(tl.int64) * WIDTH + (head * HEAD_DIM + earlier_values * (VALUE_DIM - HEAD_DIM)) + column
    heads = ()
    for number in tl.static_range(GROUP):
        heads += (_load_pairs(at + number * apart, gap, inside),)  # type: ignore[assignment]
    # Loaded before the branches (not for values), because inside a branch the load would wait for all heads.
    turned = stored & (head < HEADS + KV_HEADS)
    if ROTATED == HEAD_DIM:
        cos, sin = _load_pairs(rope_ptr + position * HEAD_DIM + lane, HALF, turned)
    else:
        angles = rope_ptr + position * ROTATED + lane
        cos = tl.load(angles, mask=turned & (lane < TURNED), other=1.0)
        sin = tl.load(angles + TURNED, mask=turned & (lane < TURNED), other=0.0)
    page, offset = slot // PAGE_TOKENS, slot % PAGE_TOKENS
    CODES: tl.constexpr = cache_ptr.dtype.element_ty.primitive_bitwidth == 8
    kept = cache_ptr + layer.to(tl.int64) * layer_stride + page.to(tl.int64) * page_stride
    scale = kept + (PAGE_TOKENS * HEAD_DIM + offset * 4)  # the scales follow the codes of the page's tokens
    kept += offset * token_stride + column
    if head < HEADS:
        q_norm = q_norm_ptr + column
        q_scale = eps
        if WHOLE_ROWS and Q_NORMED:
            q_norm += head * HEAD_DIM
            q_scale = tl.load(scales_ptr + 2 * token, mask=real, other=0.0)
        _store_rotated(
            heads, at, HEAD_DIM, inside, cos, sin, q_norm, q_scale, gap, scale, slot >= 0, False, Q_NORMED, WHOLE_ROWS,
            HEAD_DIM, GROUP,
        )  # fmt: skip
    elif head < HEADS + KV_HEADS:
        kept += (head - HEADS) * head_stride
        scale += (head - HEADS) * head_stride
        k_norm = k_norm_ptr + column
        k_scale = eps
        if WHOLE_ROWS and K_NORMED:
            k_norm += (head - HEADS) * HEAD_DIM
            k_scale = tl.load(scales_ptr + 2 * token + 1, mask=real, other=0.0)
        _store_rotated(
            heads, kept, head_stride, stored, cos, sin, k_norm, k_scale, gap, scale, slot >= 0, CODES, K_NORMED,
            WHOLE_ROWS, HEAD_DIM, GROUP,
        )  # fmt: skip
    else:
        if VALUE_DIM != HEAD_DIM:
            kept += offset * (VALUE_DIM - HEAD_DIM)
            scale += PAGE_TOKENS * (VALUE_DIM - HEAD_DIM)
        kept += kind_stride + (head - HEADS - KV_HEADS) * head_stride
        scale += kind_stride + (head - HEADS - KV_HEADS) * head_stride
        for number in tl.static_range(GROUP):
            to, scale_at = kept + number * head_stride, scale + number * head_stride
            store_head(
                to, scale_at, heads[number][0], heads[number][1], gap, stored, slot >= 0, CODES,
                qkv_ptr.dtype.element_ty,
            )  # fmt: skip


@triton.jit
def _store_rotated(
    heads,
    to,
    stride,
    mask,
    cos,
    sin,
    norm,
    scale,
    gap,
    code_scale,
    present,
    CODES: tl.constexpr,
    NORMED: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Rotate the heads in `heads`, after their norm if NORMED, and store them from `to` on, `stride` apart.

    With WHOLE_ROWS `scale` [TOKENS, 1] is the factor of the norm and every head has its own weights, else `scale` is
    the epsilon. With CODES heads are quantized, and the scales of tokens that are `present` are stored from
    `code_scale` on.
    """
    first_weight, second_weight = cos, sin
    if NORMED and not WHOLE_ROWS:
        first_weight, second_weight = _load_pairs(norm, gap, mask)
    for number in tl.static_range(GROUP):
        x, y = heads[number][0].to(tl.float32), heads[number][1].to(tl.float32)
        if NORMED:
            if WHOLE_ROWS:
                factor = scale
                first_weight, second_weight = _load_pairs(norm + number * HEAD_DIM, gap, mask)
            else:
                factor = tl.rsqrt(tl.sum(x * x + y * y, axis=1, keep_dims=True) / HEAD_DIM + scale)
            x, y = x * factor * first_weight.to(tl.float32), y * factor * second_weight.to(tl.float32)
        first, second = x * cos - y * sin, y * cos + x * sin
        store_head(
            to + number * stride, code_scale + number * stride, first, second, gap, mask, present, CODES,
            heads[number][0].dtype,
        )  # fmt: skip


@triton.jit
def _load_pairs(at, gap, mask):
    return tl.load(at, mask=mask, other=0.0), tl.load(at + gap, mask=mask, other=0.0)
