"""What attention of windows needs around it: queries once for each window they see, and one result of all their parts.

A row's queries see the latest `window` tokens of their context in its first segment, the `window` before these in the
second, and so on: counted from each query's own position, so that one width cuts them all. In segment j the context
ends j · window tokens earlier, and only the queries that see anything of it are there. Nothing depends on what the host
knows of the rows, as CUDA graphs want it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.base import StepLayout
from engine.kernels.triton_launch import launch_dependents, wait_for_inputs
from wire.ending import pages_for

_BLOCK = 1024
"""Tokens or pages that a planning program writes at a time."""
_MERGED = 8
"""Parts of a result that are loaded at a time."""
_ELEMENTS_PER_WARP = 512


@dataclass(frozen=True, slots=True)
class Segments:
    """S rows of attention to windows, of N queries in all at most; int32. Those that a step lacks are empty.

    starts     [S + 1] as `StepLayout.row_starts`
    contexts   [S] tokens up to the last query's window's end
    page_table [S, pages]
    sources    [N] the token of the step whose query it is
    places     [T', windows] which query is the token's in each window that it sees, of tokens from the first row on
    row_starts [R + 1] of the step's rows from the first on
    positions  [T] of the step's tokens
    first: host int, the number of tokens before those rows
    window: host int, how many of the latest tokens a query sees
    longest: host int, most queries of a segment
    """

    starts: Tensor
    contexts: Tensor
    page_table: Tensor
    sources: Tensor
    places: Tensor
    row_starts: Tensor
    positions: Tensor
    first: int
    window: int
    longest: int


def plan_segments(layout: StepLayout, first_row: int, window: int, page_tokens: int) -> Segments:
    """Of the rows from `first_row` on; those before have one token each. There is room for `layout.windows` windows in
    a row, and for as many beside one for each row in all.

    Its launch overlaps no other, nor may the next one's (`triton_embed.embed`'s): all later kernels see what it writes.
    """
    row_starts, contexts, table = (
        each[first_row:] for each in (layout.row_starts, layout.context_lens, layout.page_table)
    )
    positions, windows = layout.positions, layout.windows
    rows, tokens = len(contexts), len(positions) - first_row
    segments = windows + rows

    def numbers(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.int32, device=positions.device)

    plan = Segments(
        starts=numbers(segments + 1),
        contexts=numbers(segments),
        page_table=numbers(segments, min(table.shape[1], pages_for(windows * window, page_tokens))),
        sources=numbers(tokens * windows),
        places=numbers(tokens, windows),
        row_starts=row_starts,
        positions=positions,
        first=first_row,
        window=window,
        longest=layout.max_row_tokens,
    )
    _plan[(segments,)](
        row_starts,
        contexts,
        table,
        table.stride(0),
        rows,
        plan.starts,
        plan.contexts,
        plan.page_table,
        plan.page_table.shape[1],
        plan.sources,
        plan.places,
        first_row,
        windows,
        WINDOW=window,
        ROWS=triton.next_power_of_2(rows),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return plan


def gather_queries(q: Tensor, plan: Segments, *, pdl: bool) -> Tensor:
    """q [T, heads, head_dim] of the step, whose tokens and heads may be strided → [N, heads, head_dim], contiguous;
    what lies behind the last segment is anything.
    """
    _, heads, head_dim = q.shape
    out = torch.empty(len(plan.sources), heads, head_dim, dtype=q.dtype, device=q.device)
    padded_heads, padded = triton.next_power_of_2(heads), triton.next_power_of_2(head_dim)
    _gather[(len(plan.sources),)](
        q,
        q.stride(0),
        q.stride(1),
        plan.sources,
        plan.starts,
        len(plan.contexts),
        out,
        HEADS=heads,
        DIM=head_dim,
        PADDED_HEADS=padded_heads,
        PADDED=padded,
        PDL=pdl,
        num_warps=min(max(padded_heads * padded // _ELEMENTS_PER_WARP, 1), 8),
        launch_pdl=pdl,
    )
    return out


def merge_segments(parts: Tensor, lse: Tensor, plan: Segments) -> Tensor:
    """The results of windows, parts [N, heads, head_dim], and the logarithms of the sums of their scores' exponentials,
    lse [heads, N] float32 → [T, heads, head_dim] of the step, in the parts' dtype: nothing before the first row, zeros
    for tokens of no row. Summed in float32, in the windows' order.

    Its launch overlaps no other, nor may the next one's: another stream's work may have to end before that.
    """
    queries, heads, head_dim = parts.shape
    tokens, windows = plan.places.shape
    out = torch.empty(plan.first + tokens, heads, head_dim, dtype=parts.dtype, device=parts.device)
    _merge[(tokens, heads)](
        parts,
        lse,
        queries,
        plan.places,
        plan.first,
        windows,
        plan.positions,
        plan.row_starts,
        len(plan.row_starts) - 1,
        out,
        WINDOW=plan.window,
        WINDOWS=triton.next_power_of_2(windows),
        BLOCK=min(_MERGED, triton.next_power_of_2(windows)),
        DIM=head_dim,
        PADDED=triton.next_power_of_2(head_dim),
        num_warps=2,
    )
    return out


@triton.jit
def _plan(
    row_starts_ptr,
    contexts_ptr,
    table_ptr,
    table_stride,
    rows,
    starts_ptr,
    seen_ptr,
    pages_ptr,
    pages,
    sources_ptr,
    places_ptr,
    first_token,
    windows,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (segment)."""
    segment = tl.program_id(0)
    row = tl.arange(0, ROWS)
    inside = row < rows
    first = tl.load(row_starts_ptr + row, mask=inside, other=0)
    tokens = tl.load(row_starts_ptr + row + 1, mask=inside, other=0) - first
    context = tl.load(contexts_ptr + row, mask=inside, other=0)
    cuts = tl.where(tokens > 0, (context + WINDOW - 1) // WINDOW, 0)
    queries = _queries_before(cuts, tokens, context, WINDOW)
    segments_end = tl.cumsum(cuts, 0)
    queries_end = tl.cumsum(queries, 0)

    mine = (segments_end - cuts <= segment) & (segment < segments_end)
    number = segment - _chosen(segments_end - cuts, mine)
    of_row = _chosen(row, mine)
    my_tokens = _chosen(tokens, mine)
    my_context = _chosen(context, mine)
    is_there = segment < tl.max(segments_end, 0)
    seen = tl.where(is_there, my_context - number * WINDOW, 0)
    length = tl.minimum(my_tokens, seen)
    before = _chosen(queries_end - queries, mine) + _queries_before(number, my_tokens, my_context, WINDOW)
    start = tl.where(is_there, before, tl.max(queries_end, 0))
    tl.store(starts_ptr + segment, start)
    tl.store(seen_ptr + segment, seen)
    if segment == tl.num_programs(0) - 1:
        tl.store(starts_ptr + segment + 1, start + length)

    token = _chosen(first, mine) + my_tokens - length
    for done in range(0, length, BLOCK):
        query = done + tl.arange(0, BLOCK)
        fits = (query < length) & (number < windows)
        tl.store(sources_ptr + start + query, token + query, mask=fits)
        tl.store(places_ptr + (token + query - first_token) * windows + number, start + query, mask=fits)
    for done in range(0, pages, BLOCK):
        page = done + tl.arange(0, BLOCK)
        held = tl.load(table_ptr + of_row.to(tl.int64) * table_stride + page, mask=page < pages)
        tl.store(pages_ptr + segment.to(tl.int64) * pages + page, held, mask=page < pages)


@triton.jit
def _queries_before(number, tokens, context, WINDOW: tl.constexpr):
    """Of a row's segments before this one: all its tokens, until the context before the window is shorter."""
    whole = tl.minimum(number, (context - tokens) // WINDOW + 1)
    rest = number - whole
    return whole * tokens + rest * context - WINDOW * (number * (number - 1) - whole * (whole - 1)) // 2


@triton.jit
def _chosen(values, one):
    return tl.sum(tl.where(one, values, 0), 0)


@triton.jit
def _gather(
    q_ptr,
    token_stride,
    head_stride,
    sources_ptr,
    starts_ptr,
    segments,
    out_ptr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (query)."""
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    query = tl.program_id(0)
    if query < tl.load(starts_ptr + segments):
        token = tl.load(sources_ptr + query).to(tl.int64)
        head, dim = tl.arange(0, PADDED_HEADS)[:, None], tl.arange(0, PADDED)[None, :]
        inside = (head < HEADS) & (dim < DIM)
        values = tl.load(q_ptr + token * token_stride + head * head_stride + dim, mask=inside)
        tl.store(out_ptr + (query.to(tl.int64) * HEADS + head) * DIM + dim, values, mask=inside)


@triton.jit
def _merge(
    parts_ptr,
    lse_ptr,
    queries,
    places_ptr,
    first_token,
    windows,
    positions_ptr,
    row_starts_ptr,
    rows,
    out_ptr,
    WINDOW: tl.constexpr,
    WINDOWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Program (token, head). What a token sees goes by its position: the other places hold anything."""
    token, head = first_token + tl.program_id(0), tl.program_id(1)
    is_of_row = token < tl.load(row_starts_ptr + rows)
    seen = tl.where(is_of_row, tl.minimum(tl.load(positions_ptr + token) // WINDOW + 1, windows), 0)
    places = places_ptr + tl.program_id(0) * windows
    of_head = lse_ptr + head.to(tl.int64) * queries

    every = tl.arange(0, WINDOWS)
    at = tl.load(places + every, mask=every < seen, other=0)
    sums = tl.load(of_head + at, mask=every < seen, other=float("-inf"))
    most = tl.where(seen > 0, tl.max(sums, 0), 0.0)
    total = tl.sum(tl.where(every < seen, tl.exp(sums - most), 0.0), 0)

    dim = tl.arange(0, PADDED)
    mixed = tl.zeros((PADDED,), tl.float32)
    for done in range(0, seen, BLOCK):
        window = done + tl.arange(0, BLOCK)
        place = tl.load(places + window, mask=window < seen, other=0).to(tl.int64)
        lse = tl.load(of_head + place, mask=window < seen, other=float("-inf"))
        weight = tl.where(window < seen, tl.exp(lse - most) / total, 0.0)
        values = parts_ptr + (place * tl.num_programs(1) + head)[:, None] * DIM + dim[None, :]
        part = tl.load(values, mask=(window < seen)[:, None] & (dim < DIM)[None, :], other=0.0)
        mixed += tl.sum(weight[:, None] * part.to(tl.float32), 0)
    out = out_ptr + (token.to(tl.int64) * tl.num_programs(1) + head) * DIM + dim
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=dim < DIM)
