"""A way to cut decode attention that the engine does not take yet: programs that walk over the ends of rows.

The engine's programs each have one row. Where rows fill the GPU each row has one program, and the longest of uneven
rows holds up all; where rows share programs, there is a program more for each row, so that many rows have more programs
than the GPU holds at a time. Here all rows' tiles lie in one line, cut into `Plan.slots` stretches of one length, and a
program takes whatever rows its stretch meets, one after another.
"""

import triton
import triton.language as tl

from engine.kernels.triton_attention import DecodeAttention, Plan
from engine.kernels.triton_attention_kernel import (
    _dot,
    _fetch_into_cache,
    _merge,
    _page_of_tile,
    _tiles_of,
    _token_offsets,
)
from engine.kernels.triton_launch import launch_dependents, wait_for_inputs


@triton.jit
def _weights_of(context_lens, first, rows, WINDOW: tl.constexpr, BLOCK_TOKENS: tl.constexpr, ROWS_TILE: tl.constexpr):
    """Tiles [ROWS_TILE] of rows from `first` on, at least one, as somebody has to write a padded row's zeros; 0 behind
    the last row.
    """
    number = first + tl.arange(0, ROWS_TILE)
    context = tl.load(context_lens + number, mask=number < rows, other=0)
    return tl.where(number < rows, tl.maximum(_tiles_of(context, WINDOW, BLOCK_TOKENS), 1), 0)


@triton.jit(
    do_not_specialize=["table_stride", "least_tiles", "rows", "slots"],
    do_not_specialize_on_alignment=["page_table", "context_lens"],
)
def walking_attention_kernel(
    q,
    cache,
    page_table,
    context_lens,
    out,
    partials,
    partial_lse,
    counters,
    q_row_stride,
    q_head_stride,
    layer_offset,
    page_stride,
    table_stride,
    least_tiles,
    rows,
    slots,
    log2_scale,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MERGED_SPLITS: tl.constexpr,
    LINES: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Program (key head, unit). The partial results of a row and key head lie side by side, the row's number behind the
    unit's.
    """
    launch_dependents(PDL)
    kv_head = tl.program_id(0)
    unit = tl.program_id(1)
    head = tl.arange(0, GROUP_TILE)
    token = tl.arange(0, BLOCK_TOKENS)
    dim = tl.arange(0, DIM_PADDED)
    held = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    if not EARLY:
        wait_for_inputs(PDL)

    total = 0
    for first in tl.range(0, rows, ROWS_TILE):
        total += tl.sum(_weights_of(context_lens, first, rows, WINDOW, BLOCK_TOKENS, ROWS_TILE))
    stretch = tl.maximum(tl.cdiv(total, slots), least_tiles)
    start_tile = unit * stretch
    end_tile = tl.minimum(start_tile + stretch, total)
    first_row = 0
    last_row = 0
    before = 0
    passed = 0
    for first in tl.range(0, rows, ROWS_TILE):
        weight = _weights_of(context_lens, first, rows, WINDOW, BLOCK_TOKENS, ROWS_TILE)
        ends = passed + tl.cumsum(weight, 0)
        ended = (weight > 0) & (ends <= start_tile)
        first_row += tl.sum(ended.to(tl.int32))
        before += tl.sum(tl.where(ended, weight, 0))
        last_row += tl.sum(((weight > 0) & (ends - weight < end_tile)).to(tl.int32))
        passed += tl.sum(weight)

    keys_of_head = cache + layer_offset + kv_head * (PAGE_TOKENS * HEAD_DIM)
    values_of_head = keys_of_head + KV_HEADS * PAGE_TOKENS * HEAD_DIM
    if EARLY:
        if PDL:
            row = tl.minimum(first_row, rows - 1)
            context = tl.load(context_lens + row)
            begin = 0
            if WINDOW > 0:
                begin = tl.maximum(context - WINDOW, 0)
            start = begin // BLOCK_TOKENS + start_tile - before
            page = _page_of_tile(page_table + row * table_stride, start, begin, context, PAGE_TOKENS, BLOCK_TOKENS)
            line = tl.arange(0, LINES)
            spot = _token_offsets(page, start, page_stride, PAGE_TOKENS, BLOCK_TOKENS, HEAD_DIM)
            if PAGE_TOKENS % BLOCK_TOKENS == 0:
                spot += token[:, None] * HEAD_DIM
            spot += line[None, :] * (DIM_PADDED // LINES)
            position = start * BLOCK_TOKENS + token
            wanted = ((position >= begin) & (position < context))[:, None] & (line * (DIM_PADDED // LINES) < HEAD_DIM)
            _fetch_into_cache(cache, keys_of_head + spot, wanted)
            _fetch_into_cache(cache, values_of_head + spot, wanted)
        wait_for_inputs(PDL)

    if PAGE_TOKENS % BLOCK_TOKENS == 0:
        cells = token[:, None] * HEAD_DIM + dim[None, :]
    else:
        cells = dim[None, :]
    flat = before
    for row in tl.range(first_row, last_row):
        context = tl.load(context_lens + row)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(context - WINDOW, 0)
        first_tile = begin // BLOCK_TOKENS
        tiles = tl.cdiv(context, BLOCK_TOKENS) - first_tile
        weight_of_row = tl.maximum(tiles, 1)
        start = first_tile + tl.maximum(start_tile - flat, 0)
        end = first_tile + tl.minimum(end_tile - flat, tiles)
        first_unit = flat // stretch
        active = (flat + weight_of_row - 1) // stretch - first_unit + 1
        table = page_table + row * table_stride
        page = _page_of_tile(table, start, begin, context, PAGE_TOKENS, BLOCK_TOKENS)
        q_cells = row * q_row_stride + (kv_head * GROUP + head)[:, None] * q_head_stride + dim[None, :]
        query = tl.load(q + q_cells, mask=held, other=0.0)
        highest = tl.full([GROUP_TILE], float("-inf"), tl.float32)
        mass = tl.zeros([GROUP_TILE], tl.float32)
        mixed = tl.zeros([GROUP_TILE, DIM_PADDED], tl.float32)

        for tile in tl.range(start, end):
            offset = _token_offsets(page, tile, page_stride, PAGE_TOKENS, BLOCK_TOKENS, HEAD_DIM)
            # The next tile's page id is on its way while this one is computed.
            page = _page_of_tile(table, tile + 1, begin, context, PAGE_TOKENS, BLOCK_TOKENS)
            position = tile * BLOCK_TOKENS + token
            seen = position < context
            if WINDOW > 0:
                seen = seen & (position >= begin)
            loaded = seen[:, None] & (dim < HEAD_DIM)[None, :]
            key = tl.load(keys_of_head + offset + cells, mask=loaded, other=0.0)
            scores = _dot(query, tl.trans(key), WIDE_DOT) * log2_scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, axis=1))
            share = tl.exp2(scores - higher[:, None])
            fade = tl.exp2(highest - higher)
            mass = mass * fade + tl.sum(share, axis=1)
            value = tl.load(values_of_head + offset + cells, mask=loaded, other=0.0)
            mixed = mixed * fade[:, None] + _dot(share.to(value.dtype), value, WIDE_DOT)
            highest = higher

        result = mixed / tl.where(mass > 0.0, mass, 1.0)[:, None]
        lane = row * KV_HEADS + kv_head
        out_row = out + lane * (GROUP * HEAD_DIM)
        out_cells = head[:, None] * HEAD_DIM + dim[None, :]
        if active == 1:
            tl.store(out_row + out_cells, result.to(out.dtype.element_ty), mask=held)
        else:
            first_partial = kv_head * (slots + rows) + first_unit + row
            lane_partials = partials + first_partial * (GROUP * HEAD_DIM)
            lane_lse = partial_lse + first_partial * GROUP
            split = unit - first_unit
            tl.store(lane_partials + split * (GROUP * HEAD_DIM) + out_cells, result, mask=held)
            tl.store(lane_lse + split * GROUP + head, highest + tl.log2(mass), mask=head < GROUP)
            # All warps' stores come before the one thread that counts.
            tl.debug_barrier()
            arrived = tl.atomic_add(counters + lane, 1, sem="acq_rel", scope="gpu")
            if arrived == active - 1:
                merged = _merge(
                    lane_partials, lane_lse, active, GROUP, GROUP_PADDED, HEAD_DIM, DIM_PADDED, MERGED_SPLITS
                )
                member = tl.arange(0, GROUP_PADDED)
                kept = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
                merged_cells = member[:, None] * HEAD_DIM + dim[None, :]
                tl.store(out_row + merged_cells, merged.to(out.dtype.element_ty), mask=kept)
                tl.store(counters + lane, 0)
        flat += weight_of_row


class WalkingAttention(DecodeAttention):
    """`DecodeAttention` by programs that walk: `choose` gives plans with `slots`, which are all the programs a key head
    has.
    """

    kernel = walking_attention_kernel

    def _grid(self, chosen: Plan, rows: int) -> tuple[int, int, int]:
        if not chosen.slots:
            raise ValueError(f"{chosen} has no number of programs for {rows} rows to share")
        return self._shape.kv_heads, chosen.slots, 1
