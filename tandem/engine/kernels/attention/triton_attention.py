"""Decode attention over the paged cache: one query per row, split over the context, in one launch.

Flash-Decoding (Dao et al. 2023) over a block-major cache. A program takes one key head and a range of the tiles that
rows see. It holds all query heads that share the key head as the rows of one tile, so that every key and value is read
from memory once. The tiles of all rows are concatenated and cut into ranges of equal length, one for each program, so
that no program waits for a long row. There are as many ranges as programs that run concurrently, or twice as many. A
single row, and each row in float32, is split on its own. The grid depends only on the number of rows, as CUDA graphs
require: the length of the ranges, and the rows that each range contains, are computed on the device from the rows'
contexts, once per step. Of the programs that share a row and key head, the last to finish merges the partial results in
the order of the ranges, so the same inputs give the same bits.

Rows that verify draft tokens are computed in groups of up to `tokens` rows of one request: the queries of all rows of
the group fill one tile, each query sees the positions up to its own, and the request's KV is read once.
"""

import threading
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.attention.triton_attention_kernels import persistent_attention_kernel, split_attention_kernel
from tandem.engine.kernels.attention.triton_attention_plan import LEAST_DOT, Plan, PlanFunction, make_plan
from tandem.engine.kernels.attention.triton_attention_ranges import TileRange, plan_tile_ranges_kernel
from tandem.engine.kernels.attention.triton_attention_tiles import LOG2_E
from tandem.engine.kernels.kv_cache import KvCache, codes_of, part_stride
from tandem.engine.kernels.triton_launch import INTERPRETED, prefer_shared_memory

MERGED_ELEMENTS = 8192
"""Number of float32 elements of partial results that a merging program loads at once.

These are, for example, 16 splits of 4 heads of dimension 128. A program whose tile of queries is larger than the
smallest tile loads half of this number, because the registers also hold the tile.
"""
LINE_BYTES = 128
"""Size of a line of the L2 cache in bytes."""
INTERPRETER_SMS = 8
"""Number of multiprocessors to plan for without a GPU; small, because Triton's interpreter is slow."""

ROWS_TILE = 32
"""Number of rows whose context lengths a program reads at a time: one per thread of a warp."""
ENDLESS = 1 << 30
"""The page table's capacity, in tokens, for which scratch memory is allocated: practically unlimited."""


class _Step(NamedTuple):
    """The tensors and plans that `begin_step` keeps for the calls of the step."""

    rows: int
    capacity: int
    plan: Plan
    tile_ranges: Tensor
    groups: Tensor | None


class DecodeAttention:
    """Decode attention of rows with one token each. Call `begin_step` once per step, then the object once per layer.

    It owns scratch memory that all calls share, so calls must not overlap. Calls on one stream never overlap, with or
    without programmatic dependent launch. The scratch memory takes some MiB: float32 partial results, as many as a step
    can have, and a counter for each row and key head, which is 0 between calls.

    shape      heads, scale, window and soft cap; head_dim is a multiple of 16
    max_rows   maximum number of rows of a call, or of groups
    dtype      dtype of queries, and of keys and values that are not quantized
    kv_dtype   dtype of the cache; None = dtype
    pdl        launch with programmatic dependent launch (see `triton_launch`)
    early      the caller guarantees that page tables and context lengths are not written by kernels in the same chain
               of overlapped launches, but for example by a copy or another graph. With `pdl` the kernel then reads
               them, and prefetches the first keys and values into the L2 cache, while the previous kernel still runs
    choose     the function that returns the plan of a call; tuning and tests pass their own
    tokens     maximum number of rows of a group; 1 = each row is computed separately, and calls have no groups
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
        kv_dtype: torch.dtype | None = None,
        tokens: int = 1,
    ) -> None:
        if shape.heads % shape.kv_heads:
            raise ValueError(f"{shape.heads} query heads do not divide into {shape.kv_heads} key heads")
        self._shape = shape
        self._max_rows = max_rows
        self._kv_dtype = dtype if kv_dtype is None else kv_dtype
        # Plans of float32 fix the order of accumulation, so they must not depend on what the cache holds.
        self._planned_dtype = dtype if dtype == torch.float32 else self._kv_dtype
        self._pdl = pdl
        self._early = early
        self._choose = choose
        self._tokens = tokens
        self._plans: dict[tuple[int, int], Plan] = {}
        self._sms = INTERPRETER_SMS
        if device.type == "cuda":
            self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        # The scratch memory must suffice for any page table, whose width is not known before a step.
        most = max(self._plan(rows, ENDLESS).partials(rows) for rows in range(1, max_rows + 1))
        partials = most * shape.heads * tokens
        self._partials = torch.empty(partials, shape.v_dim, dtype=torch.float32, device=device)
        self._partial_lse = torch.empty(partials, dtype=torch.float32, device=device)
        self._counters = torch.zeros(max_rows * shape.kv_heads, dtype=torch.int32, device=device)
        self._device = device
        self._begun = threading.local()
        self._all_tile_ranges: dict[tuple[int, int, int], Tensor] = {}

    def reset(self) -> None:
        """Zero the counters after calls that may have overlapped; the results of these calls are undefined."""
        self._counters.zero_()

    def begin_step(
        self, cache: KvCache, page_table: Tensor, context_lens: Tensor, groups: Tensor | None = None
    ) -> None:
        """Plan a step. Called once before the calls of a step, by the same thread and with the arguments of the calls.

        `groups` is `DraftGroups.table` if a group may have several rows (`tokens` > 1), else None.

        The planning kernel does not overlap with the kernel before it. The next kernel (`triton_embed.embed`) must not
        overlap with the planning kernel, so that all later kernels see the plan. Raises ValueError for more than
        `max_rows` rows, for a cache whose dtype is not `kv_dtype`, or if `groups` does not match `tokens`.
        """
        rows, capacity = len(context_lens), page_table.shape[1] * cache.shape[4]
        if (groups is None) != (self._tokens == 1):
            raise ValueError(f"groups of {self._tokens} rows need a table, and only they")
        if groups is not None:
            rows = len(groups) - 1
        if rows > self._max_rows:
            raise ValueError(f"{rows} rows, but scratch for {self._max_rows}")
        if codes_of(cache).dtype != self._kv_dtype:
            raise ValueError(f"a cache of {codes_of(cache).dtype}, but scratch for {self._kv_dtype}")
        plan = self._plan(rows, capacity)
        tile_ranges = self._tile_ranges(rows, plan.units)
        self._begun.step = _Step(rows, capacity, plan, tile_ranges, groups)
        if plan.units:
            plan_tile_ranges_kernel[plan.units,](
                context_lens,
                context_lens if groups is None else groups,
                tile_ranges,
                rows,
                WINDOW=self._shape.window_code,
                BLOCK_TOKENS=plan.block_tokens,
                ROWS_TILE=ROWS_TILE,
                TOKENS=self._tokens,
                num_warps=1,
            )

    def __call__(
        self,
        q: Tensor,
        cache: KvCache,
        layer: int,
        page_table: Tensor,
        context_lens: Tensor,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
        *,
        alone: bool = False,
    ) -> Tensor:
        """Compute attention of each row's query to positions up to context - 1 of its pages, see `AttentionShape`.

        q            [R, heads, head_dim]; rows and heads may be strided
        cache        [pages, layers, 2, kv_heads, page_tokens, head_dim], its last two dimensions contiguous, or an
                     `UnequalKv`; if it is quantized, the scales follow the codes in memory, as `QuantizedKv` says
        page_table   [R, W] int32; entries after a row's context are not read
        context_lens [R] int32; 0 marks a padding row, which reads nothing and gives zeros
        out          memory for the contiguous result; None = it is allocated
        sinks        [heads] float32 as in `AttentionLayer.sinks`, never written by an earlier kernel, or None
        alone        the launch does not overlap with the one before it on its stream
        → [R, heads·v_dim], dtype of q. Raises ValueError unless `begin_step` was called for as many rows and a page
        table of the same width
        """
        tokens, shape, held = len(q), self._shape, codes_of(cache)
        page_tokens = held.shape[4]
        step: _Step | None = getattr(self._begun, "step", None)
        rows = tokens if step is None or step.groups is None else step.rows
        if step is None or (step.rows, step.capacity) != (rows, page_table.shape[1] * page_tokens):
            raise ValueError(f"{tokens} rows of a step that began with others")
        chosen = step.plan
        if out is None:
            out = torch.empty(tokens, shape.output_size, dtype=q.dtype, device=q.device)
        pdl = self._pdl and not alone
        kernel: Any
        if chosen.units:
            kernel = persistent_attention_kernel[shape.kv_heads, chosen.units]
            cut = {"tile_ranges": step.tile_ranges, "rows": rows}
        else:
            kernel = split_attention_kernel[shape.kv_heads, rows, chosen.splits]
            cut = {"least_tiles": chosen.least_tiles}
        compiled = kernel(
            q,
            held,
            page_table,
            context_lens,
            out,
            self._partials,
            self._partial_lse,
            self._counters,
            q.stride(0),
            q.stride(1),
            held.stride(1) * layer,
            held.stride(0),
            page_table.stride(0),
            shape.scale * LOG2_E.value,
            q if sinks is None else sinks,
            context_lens if step.groups is None else step.groups,
            tokens,
            **cut,
            **self._constants(page_tokens, chosen.block_tokens, held.element_size()),
            HEAD_STRIDE=held.stride(3),
            PART_STRIDE=part_stride(cache),
            SINKS=sinks is not None,
            PDL=pdl,
            EARLY=self._early,
            WIDE_DOT=INTERPRETED,
            num_warps=chosen.warps,
            num_stages=chosen.stages,
            launch_pdl=pdl,
        )
        if pdl and chosen.shared_percent and compiled is not None:  # None: see `tandem.engine.cuda.compile_ahead.Trial`
            prefer_shared_memory(compiled, chosen.shared_percent)
        return out

    def _constants(self, page_tokens: int, block_tokens: int, item_bytes: int) -> dict[str, float]:
        shape = self._shape
        group = shape.heads // shape.kv_heads
        group_padded = triton.next_power_of_2(group)
        dim_padded, value_padded = triton.next_power_of_2(shape.head_dim), triton.next_power_of_2(shape.v_dim)
        group_tile = max(LEAST_DOT, group_padded * self._tokens)
        merged_tile = group_padded if self._tokens == 1 else group_tile
        large = self._tokens > 1 and group_tile > LEAST_DOT
        merged_elements = MERGED_ELEMENTS // 2 if large else MERGED_ELEMENTS
        return {
            "GROUP": group,
            "GROUP_TILE": group_tile,
            "GROUP_PADDED": group_padded,
            "KV_HEADS": shape.kv_heads,
            "HEAD_DIM": shape.head_dim,
            "DIM_PADDED": dim_padded,
            "VALUE_DIM": shape.v_dim,
            "VALUE_PADDED": value_padded,
            "PAGE_TOKENS": page_tokens,
            "BLOCK_TOKENS": block_tokens,
            "MERGED_TILE": merged_tile,
            "MERGED_SPLITS": max(1, merged_elements // (merged_tile * value_padded)),
            "TOKENS": self._tokens,
            "LINES": max(1, dim_padded * item_bytes // LINE_BYTES),
            "VALUE_LINES": max(1, value_padded * item_bytes // LINE_BYTES),
            "WINDOW": shape.window_code,
            "SOFTCAP": (shape.softcap or 0.0) * LOG2_E.value,
        }

    def _plan(self, rows: int, capacity: int) -> Plan:
        key = (rows, capacity)
        if key not in self._plans:
            shape = self._shape
            seen = min(capacity, shape.most_seen or capacity)
            self._plans[key] = self._choose(rows, shape.kv_heads, shape.head_dim, seen, self._planned_dtype, self._sms)
        return self._plans[key]

    def _tile_ranges(self, rows: int, units: int) -> Tensor:
        """Return this thread's memory for the tile ranges of `rows` rows and `units` programs: [units, fields] int32.

        The fields are those of `TileRange`. Each thread has separate memory, because trial steps run concurrently
        during the start; and so has each pair of `rows` and `units`, because a trial step may skip the launch that
        fills the memory. `units` also depends on the width of the page table. The memory is kept after the thread has
        ended, because CUDA graphs that the thread captured read and write it.
        """
        key = threading.get_ident(), rows, units
        if key not in self._all_tile_ranges:
            self._all_tile_ranges[key] = torch.zeros(
                units, len(TileRange._fields), dtype=torch.int32, device=self._device
            )
        return self._all_tile_ranges[key]
