"""Decode attention over the paged cache: one query a row, split over the context, in one launch.

Flash-Decoding (Dao et al. 2023) over a block-major cache. A program takes one key head and a stretch of the tokens that
rows see, and holds all query heads that share the key head as the rows of one tile, so that every key and value is read
from memory once. Rows lie one behind the other, and stretches are of one length whatever the rows' lengths: as many as
there are programs that run at a time, so that no program waits for another's end and none is held up by a long row. A
single row, and those of float32, are cut each by itself. The grid depends on the number of rows alone, as CUDA graphs
want it: how long a stretch is, and which rows it meets, follows on the device from the rows' contexts, once a step. The
last program of a row and key head to finish merges the partial results in the order of the stretches, whoever that is,
so the same inputs give the same bits.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from engine.kernels.base import AttentionShape
from engine.kernels.triton_attention_kernels import (
    Walk,
    plan_walks_kernel,
    split_attention_kernel,
    walking_attention_kernel,
)
from engine.kernels.triton_launch import INTERPRETED, share_memory_evenly

LEAST_DOT = 16
"""Fewest rows of a tile that the matrix units take."""
MERGED_ELEMENTS = 8192
"""Partial results (float32) that a merging program loads at once: 16 splits of 4 heads of 128."""
LINE_BYTES = 128
"""A line of the L2 cache."""
INTERPRETER_SMS = 8
"""Stands for the number of multiprocessors where there is no GPU; small, as the interpreter is slow."""

PROGRAMS_PER_SM, NARROW_PROGRAMS_PER_SM = 2, 4
"""Programs among which rows are divided, the second with `NARROW_TILE`: as many as have room at a time. With room for
more, those of the next call would come in before this one's have ended, and leave some multiprocessors with too many.
"""
NEARLY = 15 / 16
"""Part of these at which there are as many as divide rows of one length evenly: the others would have nothing to do."""
MOST_SPLITS = 32
"""More make a row no faster, as its last program has to merge them."""
ROWS_TILE = 32
"""Rows whose contexts a program looks at together: one warp's."""
EXACT_SPLITS, EXACT_TOKENS = 8, 512
"""Splits and shortest stretch of float32, whatever the batch."""
ENDLESS = 1 << 30
"""Tokens of a table that is as wide as any."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a call is cut up: tokens of a tile, warps, pipeline stages, and either `units` or `splits`."""

    block_tokens: int
    warps: int
    stages: int
    units: int = 0
    """Programs that walk over all rows; 0 = each row has its own."""
    splits: int = 1
    """Programs of each row."""
    least_tiles: int = 1
    """Tiles of the shortest stretch of a row that is split."""
    overlaps: bool = False
    """Whether it shares multiprocessors with the kernels before and after it (see `share_memory_evenly`)."""

    def partials(self, rows: int) -> int:
        """Partial results that `rows` rows have room for, of each key head."""
        return self.units + rows if self.units else self.splits * rows


SMALL_TILE = Plan(block_tokens=32, warps=2, stages=4, overlaps=True)
"""Few rows: small tiles are on their way soonest, and the kernels around them count."""
LARGE_TILE = Plan(block_tokens=128, warps=4, stages=2)
"""Many rows: they need all of a multiprocessor's shared memory."""
LARGE_TILE_DIMS = 128
"""Largest head dim whose tile fits into shared memory."""
NARROW_TILE = Plan(block_tokens=64, warps=2, stages=3)
"""The same of narrow heads, whose tiles are smaller."""
NARROW_DIMS = 64
"""Largest head dim of narrow heads."""

PlanFunction = Callable[[int, int, int, int, torch.dtype, int], Plan]
"""`make_plan` or a stand-in for it."""


def make_plan(rows: int, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, sms: int) -> Plan:
    """The plan of `rows` rows of at most `capacity` seen tokens on a GPU of `sms` multiprocessors.

    float32 is cut the same way whatever the batch, so that a row's bits do not depend on the rows beside it.
    """
    if dtype == torch.float32:
        block = LEAST_DOT
        splits = min(EXACT_SPLITS, -(-capacity // EXACT_TOKENS))
        return Plan(block, warps=4, stages=2, splits=splits, least_tiles=EXACT_TOKENS // block)
    tile, programs = SMALL_TILE, PROGRAMS_PER_SM * sms
    if rows * kv_heads > programs and head_dim <= NARROW_DIMS:
        tile, programs = NARROW_TILE, NARROW_PROGRAMS_PER_SM * sms
    elif rows * kv_heads > programs and head_dim <= LARGE_TILE_DIMS:
        tile = LARGE_TILE
    resident = max(1, programs // kv_heads)
    most = min(MOST_SPLITS, -(-capacity // tile.block_tokens))
    if rows == 1:
        return replace(tile, splits=min(resident, most))
    whole = resident // rows * rows
    return replace(tile, units=min(whole if whole >= NEARLY * resident else resident, rows * most))


class _Step(NamedTuple):
    """What a step began with."""

    rows: int
    capacity: int
    plan: Plan
    walks: Tensor


class DecodeAttention:
    """Attention of rows with one token each: `begin_step`, then a call for each layer. Owns scratch that all calls
    share, so calls must not overlap.

    Calls of one stream never overlap, with or without programmatic dependent launch. The scratch is some MiB: partial
    results in float32, as many as a step may have room for, and a counter for each row and key head, 0 between calls.

    shape      heads, scale and window; head_dim is a multiple of 16
    max_rows   most rows of a call
    dtype      of queries, keys and values
    pdl        launch with programmatic dependent launch (see triton_launch)
    early      page tables and context lengths are never written by a kernel of the same chain of overlapped launches
               (a copy or another graph may), so with `pdl` they are read, and the first keys and values brought into
               the L2 cache, while the kernel before still runs
    choose     the plan of a call; tuning and tests pass their own
    """

    def __init__(
        self,
        shape: AttentionShape,
        max_rows: int,
        device: torch.device,
        dtype: torch.dtype,
        pdl: bool,
        early: bool = False,
        choose: PlanFunction = make_plan,
    ) -> None:
        if shape.heads % shape.kv_heads:
            raise ValueError(f"{shape.heads} query heads do not divide into {shape.kv_heads} key heads")
        self._shape = shape
        self._max_rows = max_rows
        self._dtype = dtype
        self._pdl = pdl
        self._early = early
        self._choose = choose
        self._plans: dict[tuple[int, int], Plan] = {}
        self._sms = INTERPRETER_SMS
        if device.type == "cuda":
            self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        most = max(self._plan(rows, ENDLESS).partials(rows) for rows in range(1, max_rows + 1))
        room = most * shape.heads
        self._partials = torch.empty(room, shape.head_dim, dtype=torch.float32, device=device)
        self._partial_lse = torch.empty(room, dtype=torch.float32, device=device)
        self._counters = torch.zeros(max_rows * shape.kv_heads, dtype=torch.int32, device=device)
        self._device = device
        self._begun = threading.local()
        self._all_walks: dict[tuple[int, int, int], Tensor] = {}

    def begin_step(self, cache: Tensor, page_table: Tensor, context_lens: Tensor) -> None:
        """Once before the calls of a step by the same thread, whose arguments these will be; ValueError for more than
        `max_rows` rows, or another dtype than it has scratch for. Its launch overlaps no other, nor may the next one's
        (`triton_embed.embed`'s): all later kernels see what it writes.
        """
        rows, capacity = len(context_lens), page_table.shape[1] * cache.shape[4]
        if rows > self._max_rows:
            raise ValueError(f"{rows} rows, but scratch for {self._max_rows}")
        if cache.dtype != self._dtype:
            raise ValueError(f"a cache of {cache.dtype}, but scratch for {self._dtype}")
        plan = self._plan(rows, capacity)
        walks = self._walks(rows, plan.units)
        self._begun.step = _Step(rows, capacity, plan, walks)
        if plan.units:
            plan_walks_kernel[plan.units,](
                context_lens,
                walks,
                rows,
                WINDOW=self._shape.window or 0,
                BLOCK_TOKENS=plan.block_tokens,
                ROWS_TILE=ROWS_TILE,
                num_warps=1,
            )

    def __call__(self, q: Tensor, cache: Tensor, layer: int, page_table: Tensor, context_lens: Tensor) -> Tensor:
        """Attention of each row's query to positions context - window .. context - 1 of its pages.

        q            [R, heads, head_dim]; rows and heads may be strided
        cache        [pages, layers, 2, kv_heads, page_tokens, head_dim], contiguous
        page_table   [R, W] int32; entries behind a row's context are not read
        context_lens [R] int32; 0 marks a padded row, which reads nothing and gives zeros
        → [R, heads·head_dim], dtype of q; ValueError if the step did not begin with as many rows
        """
        rows, heads, head_dim = q.shape
        shape = self._shape
        page_tokens = cache.shape[4]
        step: _Step | None = getattr(self._begun, "step", None)
        if step is None or (step.rows, step.capacity) != (rows, page_table.shape[1] * page_tokens):
            raise ValueError(f"{rows} rows of a step that began with others")
        chosen = step.plan
        out = torch.empty(rows, heads * head_dim, dtype=q.dtype, device=q.device)
        kernel: Any
        if chosen.units:
            kernel = walking_attention_kernel[shape.kv_heads, chosen.units]
            cut = {"walks": step.walks, "rows": rows}
        else:
            kernel = split_attention_kernel[shape.kv_heads, rows, chosen.splits]
            cut = {"least_tiles": chosen.least_tiles}
        compiled = kernel(
            q,
            cache,
            page_table,
            context_lens,
            out,
            self._partials,
            self._partial_lse,
            self._counters,
            q.stride(0),
            q.stride(1),
            cache.stride(1) * layer,
            cache.stride(0),
            page_table.stride(0),
            shape.scale * math.log2(math.e),
            **cut,
            **self._constants(page_tokens, chosen.block_tokens, q.element_size()),
            PDL=self._pdl,
            EARLY=self._early,
            WIDE_DOT=INTERPRETED,
            num_warps=chosen.warps,
            num_stages=chosen.stages,
            launch_pdl=self._pdl,
        )
        if self._pdl and chosen.overlaps and compiled is not None:  # None: see `engine.compile_ahead.Trial`
            share_memory_evenly(compiled)
        return out

    def _constants(self, page_tokens: int, block_tokens: int, item_bytes: int) -> dict[str, int]:
        shape = self._shape
        group = shape.heads // shape.kv_heads
        group_padded = triton.next_power_of_2(group)
        dim_padded = triton.next_power_of_2(shape.head_dim)
        return {
            "GROUP": group,
            "GROUP_TILE": max(LEAST_DOT, group_padded),
            "GROUP_PADDED": group_padded,
            "KV_HEADS": shape.kv_heads,
            "HEAD_DIM": shape.head_dim,
            "DIM_PADDED": dim_padded,
            "PAGE_TOKENS": page_tokens,
            "BLOCK_TOKENS": block_tokens,
            "MERGED_SPLITS": max(1, MERGED_ELEMENTS // (group_padded * dim_padded)),
            "LINES": max(1, dim_padded * item_bytes // LINE_BYTES),
            "WINDOW": shape.window or 0,
        }

    def _plan(self, rows: int, capacity: int) -> Plan:
        key = (rows, capacity)
        if key not in self._plans:
            shape = self._shape
            seen = capacity if shape.window is None else min(capacity, shape.window)
            self._plans[key] = self._choose(rows, shape.kv_heads, shape.head_dim, seen, self._dtype, self._sms)
        return self._plans[key]

    def _walks(self, rows: int, units: int) -> Tensor:
        """Of this thread, so many rows and so many programs, which depend on the width of the table, too: trials of
        steps run side by side before a start, and a launch of theirs may be left out. [units, fields of `Walk`] int32,
        kept when the thread has ended: graphs that it captured read and write there.
        """
        key = threading.get_ident(), rows, units
        if key not in self._all_walks:
            self._all_walks[key] = torch.zeros(units, len(Walk._fields), dtype=torch.int32, device=self._device)
        return self._all_walks[key]
