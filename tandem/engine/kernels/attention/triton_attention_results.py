"""Device functions of decode attention that store a program's result, merged results, and the zeros of padding rows."""

import triton
import triton.language as tl

from tandem.engine.kernels.attention.triton_attention_tiles import finite, heads_of, held_queries


@triton.jit
def _merge(
    partials,
    partial_lse,
    count,
    cell_of,
    held,
    SIZE: tl.constexpr,
    SPLIT_CELLS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    MERGED_SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Return the softmax-weighted sum of `count` normalised partial results → [SIZE, DIM_PADDED] float32.

    Each partial result has SPLIT_CELLS queries. `cell_of` [SIZE] gives the positions of the queries to merge, where the
    mask `held` is True.
    """
    split = tl.arange(0, MERGED_SPLITS)
    dim = tl.arange(0, DIM_PADDED)
    highest = tl.full([SIZE], float("-inf"), tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    merged = tl.zeros([SIZE, DIM_PADDED], tl.float32)
    cell = split[:, None] * SPLIT_CELLS + cell_of[None, :]
    element = cell[:, :, None] * HEAD_DIM + dim[None, None, :]
    for first in tl.range(0, count, MERGED_SPLITS):
        present = (first + split < count)[:, None] & held[None, :]
        loaded = present[:, :, None] & (dim < HEAD_DIM)[None, None, :]
        values = tl.load(
            partials + first * SPLIT_CELLS * HEAD_DIM + element, mask=loaded, other=0.0, cache_modifier=".cg"
        )
        # A padding head gets a finite weight; any number will do, because its result is not stored.
        absent = tl.where(held, float("-inf"), 0.0)[None, :]
        lse = tl.load(partial_lse + first * SPLIT_CELLS + cell, mask=present, other=float("-inf"), cache_modifier=".cg")
        lse = tl.where(present, lse, absent)
        higher = tl.maximum(highest, tl.max(lse, axis=0))
        base = finite(higher, TOKENS)
        weight = tl.exp2(lse - base[None, :])
        fade = tl.exp2(highest - base)
        total = total * fade + tl.sum(weight, axis=0)
        merged = merged * fade[:, None] + tl.sum(values * weight[:, :, None], axis=0)
        highest = higher
    return merged / total[:, None]


@triton.jit
def deliver(
    highest,
    total,
    mixed,
    lane,
    split,
    active,
    first_partial,
    lanes,
    rows,
    out,
    partials,
    partial_lse,
    counters,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    MERGED_TILE: tl.constexpr,
    MERGED_SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Store the result of `attend` for one range of a group and key head; the last program merges the results.

    lane    group · key heads + key head
    split   the number of the range among the `active` ranges of the group and key head
    rows    the number of rows in the group
    lanes   [GROUP_TILE] row · key heads + key head of each query, which says where its final result is stored; `lane`
            if groups have one token

    If there is only one range, the result is final. Otherwise it becomes partial result `first_partial` + `split`, and
    the last of the programs to arrive merges all partial results of the group and key head.
    """
    CELLS: tl.constexpr = TOKENS * GROUP
    head = heads_of(GROUP_TILE, GROUP_PADDED, TOKENS)
    dim = tl.arange(0, DIM_PADDED)
    held_query = held_queries(rows, GROUP_TILE, GROUP, GROUP_PADDED, TOKENS)
    held = held_query[:, None] & (dim < HEAD_DIM)[None, :]
    mass = tl.where(total > 0.0, total, 1.0)
    result = mixed / mass[:, None]
    out_row = out + lanes * (GROUP * HEAD_DIM)
    if TOKENS > 1:
        out_row = out_row[:, None]
    if active == 1:
        out_cells = head[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out_row + out_cells, result.to(out.dtype.element_ty), mask=held)
    else:
        cell = _cells_of(GROUP_TILE, GROUP, GROUP_PADDED, TOKENS)
        lane_partials = partials + first_partial * (CELLS * HEAD_DIM)
        lane_lse = partial_lse + first_partial * CELLS
        partial_cells = cell[:, None] * HEAD_DIM + dim[None, :]
        tl.store(lane_partials + split * (CELLS * HEAD_DIM) + partial_cells, result, mask=held)
        tl.store(lane_lse + split * CELLS + cell, highest + tl.log2(mass), mask=held_query)
        # The barrier makes the stores of all warps come before the increment by the one thread that counts.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + lane, 1, sem="acq_rel", scope="gpu")
        if arrived == active - 1:
            kept = held_queries(rows, MERGED_TILE, GROUP, GROUP_PADDED, TOKENS)
            merged = _merge(
                lane_partials, lane_lse, active, _cells_of(MERGED_TILE, GROUP, GROUP_PADDED, TOKENS), kept,
                MERGED_TILE, CELLS, HEAD_DIM, DIM_PADDED, MERGED_SPLITS, TOKENS,
            )  # fmt: skip
            merged_cells = heads_of(MERGED_TILE, GROUP_PADDED, TOKENS)[:, None] * HEAD_DIM + dim[None, :]
            kept_cells = kept[:, None] & (dim < HEAD_DIM)[None, :]
            tl.store(out_row + merged_cells, merged.to(out.dtype.element_ty), mask=kept_cells)
            # The next call has to find the counter at 0.
            tl.store(counters + lane, 0)


@triton.jit
def _cells_of(SIZE: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, TOKENS: tl.constexpr):
    """Return the positions [SIZE] of a tile's queries in a partial result, which stores no padding heads."""
    query = tl.arange(0, SIZE)
    if TOKENS > 1:
        query = query // GROUP_PADDED * GROUP + query % GROUP_PADDED
    return query


@triton.jit
def clear_padding(
    out,
    used_at,
    tokens,
    kv_head,
    program,
    programs,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Zero one key head's results of padding rows, from the row number stored at `used_at` to `tokens` (exclusive)."""
    cell = tl.arange(0, GROUP_PADDED * DIM_PADDED)
    zeros = tl.zeros([GROUP_PADDED * DIM_PADDED], out.dtype.element_ty)
    for row in tl.range(tl.load(used_at) + program, tokens, programs):
        at = out + (row * KV_HEADS + kv_head) * (GROUP * HEAD_DIM) + cell
        tl.store(at, zeros, mask=cell < GROUP * HEAD_DIM)
