"""The indexer of sparse attention in Triton: the store of index keys, and the scores of cached tokens."""

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.latent.triton_products import dot
from tandem.engine.kernels.latent.triton_store import HEADS_TILE, WARPS, angles_at, rotate_pairs
from tandem.engine.kernels.layers import IndexQueries, LatentLayer
from tandem.engine.kernels.triton_launch import INTERPRETED, launch_dependents, wait_for_inputs

_KEYS = 128
"""Number of cached tokens whose scores a program computes."""


def index_store(
    queries: Tensor, keys: Tensor, layer: LatentLayer, cache: Tensor, layout: StepLayout, *, pdl: bool
) -> Tensor:
    """Compute `Kernels.index_store` in one launch; the queries are rotated in place.

    A token with slot -1 is not stored, and its queries are undefined. Arithmetic is float32, rounded once.
    """
    shape, index, norm = layer.shape, layer.shape.index, layer.index_norm
    assert index is not None
    assert norm is not None
    _index_store[(len(queries), 1 + triton.cdiv(index.heads, HEADS_TILE))](
        queries,
        keys,
        layer.rope,
        norm.weight,
        norm.bias,
        cache,
        layout.positions,
        layout.slots,
        cache.stride(0),
        cache.stride(1) * layer.index + shape.projected,
        norm.eps,
        HEADS=index.heads,
        DIM=index.dim,
        DIM_PADDED=triton.next_power_of_2(index.dim),
        ROPE=shape.rope,
        HALF_PADDED=triton.next_power_of_2(shape.rope // 2),
        PAGE_TOKENS=cache.shape[4],
        WIDTH=shape.cached,
        HEADS_TILE=HEADS_TILE,
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
    )
    return queries.view(-1, index.heads, index.dim)


def index_scores(
    index: IndexQueries, rows: Tensor, tokens: slice, layer: LatentLayer, cache: Tensor, layout: StepLayout, out: Tensor
) -> None:
    """Write the index scores of the step's tokens `tokens` for the positions 0, 1, … of their rows to `out`.

    rows [T] int32 the row of each token; out [tokens, positions] float32: -inf for the positions after a token's own,
    and in padding.
    """
    shape, sizes = layer.shape, layer.shape.index
    assert sizes is not None
    count, positions = out.shape
    _index_scores[(count, triton.cdiv(positions, _KEYS))](
        index.q[tokens],
        index.weights[tokens],
        cache,
        layout.page_table,
        rows[tokens],
        layout.positions[tokens],
        layout.slots[tokens],
        out,
        positions,
        cache.stride(0),
        cache.stride(1) * layer.index + shape.projected,
        layout.page_table.stride(0),
        (sizes.dim * sizes.heads) ** -0.5,
        HEADS=sizes.heads,
        HEADS_PADDED=max(triton.next_power_of_2(sizes.heads), 16),
        DIM=sizes.dim,
        DIM_PADDED=max(triton.next_power_of_2(sizes.dim), 16),
        PAGE_TOKENS=cache.shape[4],
        WIDTH=shape.cached,
        KEYS=_KEYS,
        WIDE_DOT=INTERPRETED,
        num_warps=WARPS,
    )


@triton.jit
def _index_store(
    queries_ptr,
    keys_ptr,
    rope_ptr,
    norm_ptr,
    bias_ptr,
    cache_ptr,
    positions_ptr,
    slots_ptr,
    page_stride,
    key_offset,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROPE: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, part): part 0 stores the key, part 1 + i rotates the i-th tile of heads."""
    HALF: tl.constexpr = ROPE // 2
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        half = tl.arange(0, HALF_PADDED)
        inside = half < HALF
        cos, sin = angles_at(rope_ptr, tl.load(positions_ptr + token), half, inside, HALF)
        if part == 0:
            dim = tl.arange(0, DIM_PADDED)
            source = keys_ptr + token * DIM
            target = cache_ptr + slot // PAGE_TOKENS * page_stride + key_offset + slot % PAGE_TOKENS * WIDTH
            dtype: tl.constexpr = cache_ptr.dtype.element_ty
            x = tl.load(source + dim, mask=dim < DIM, other=0.0).to(tl.float32)
            mean = tl.sum(x, axis=0) / DIM
            centred = tl.where(dim < DIM, x - mean, 0.0)
            scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / DIM + eps)
            normed = _normed_at(source, norm_ptr, bias_ptr, dim, dim < DIM, mean, scale)
            tl.store(target + dim, normed.to(dtype), mask=(dim >= ROPE) & (dim < DIM))
            first = _normed_at(source, norm_ptr, bias_ptr, half, inside, mean, scale)
            second = _normed_at(source, norm_ptr, bias_ptr, HALF + half, inside, mean, scale)
            tl.store(target + half, (first * cos - second * sin).to(dtype), mask=inside)
            tl.store(target + HALF + half, (second * cos + first * sin).to(dtype), mask=inside)
        else:
            head = (part - 1) * HEADS_TILE + tl.arange(0, HEADS_TILE)
            at = queries_ptr + (token * HEADS + head[:, None]) * DIM + half[None, :]
            rotate_pairs(at, at, cos[None, :], sin[None, :], (head < HEADS)[:, None] & inside[None, :], HALF)


@triton.jit
def _normed_at(source, norm_ptr, bias_ptr, at, mask, mean, scale):
    """Return the elements `at` of a key after its LayerNorm, in float32."""
    x = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return (x - mean) * scale * weight + tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["positions"])
def _index_scores(
    q_ptr,
    weights_ptr,
    cache_ptr,
    table_ptr,
    rows_ptr,
    positions_ptr,
    slots_ptr,
    out_ptr,
    positions,
    page_stride,
    key_offset,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Program (token, block) computes the scores of KEYS positions."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    last = tl.load(positions_ptr + token)
    if tl.load(slots_ptr + token) < 0:
        last = -1
    seen = position <= last
    scores = tl.full([KEYS], float("-inf"), tl.float32)
    if tl.program_id(1) * KEYS <= last:
        dim = tl.arange(0, DIM_PADDED)[None, :]
        head = tl.arange(0, HEADS_PADDED)
        table = table_ptr + tl.load(rows_ptr + token).to(tl.int64) * table_stride
        page = tl.load(table + position // PAGE_TOKENS, mask=seen, other=0).to(tl.int64)
        at = page * page_stride + key_offset + position % PAGE_TOKENS * WIDTH
        key = tl.load(cache_ptr + at[:, None] + dim, mask=seen[:, None] & (dim < DIM), other=0.0)
        cells = q_ptr + (token * HEADS + head)[:, None] * DIM + dim
        query = tl.load(cells, mask=(head < HEADS)[:, None] & (dim < DIM), other=0.0)
        weight = tl.load(weights_ptr + token * HEADS + head, mask=head < HEADS, other=0.0).to(tl.float32) * scale
        products = dot(key, tl.trans(query), tl.zeros([KEYS, HEADS_PADDED], tl.float32), WIDE_DOT)
        total = tl.sum(tl.maximum(products, 0.0) * weight[None, :], axis=1)
        scores = tl.where(seen, total, float("-inf"))
    tl.store(out_ptr + token * positions + position, scores, mask=position < positions)
