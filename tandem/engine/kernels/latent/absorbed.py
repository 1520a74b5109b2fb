"""Absorbed attention over the paged latents, for decode rows and for chunks of few tokens.

A head's score q · (W_uk · latent) equals (q · W_uk) · latent, so all heads can use the latent itself, which is read
once: before attention, the queries are multiplied by the key matrices, and after attention, the mixed latents by the
value matrices (DeepSeek-V2, arXiv:2405.04434, section 2.1.2). Attention itself is Flash-Decoding (Dao et al. 2023) in
two launches. The first computes partial results: the tiles of all groups are concatenated and cut into ranges of equal
length, one for each program, computed on the device once per step. The second merges the partial results in the order
of the ranges, so that the same inputs give the same bits. The grids depend only on host numbers, as CUDA graphs
require.
"""

import math
import threading
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tandem.engine.config.attention import LatentShape
from tandem.engine.kernels.kv_cache import LatentCache, codes_of, largest_code
from tandem.engine.kernels.latent.absorbed_kernels import (
    PART_FIELDS,
    RANGE_FIELDS,
    absorbed_attention_kernel,
    merge_kernel,
    plan_ranges_kernel,
)
from tandem.engine.kernels.latent.absorbed_plan import EXACT_SPLITS, EXACT_TOKENS, Plan, PlanFunction, make_plan
from tandem.engine.kernels.latent.token_groups import TokenGroups
from tandem.engine.kernels.latent.triton_products import absorb, values_of
from tandem.engine.kernels.triton_launch import INTERPRETED

INTERPRETER_SMS = 8
"""Number of multiprocessors to plan for without a GPU; small, because Triton's interpreter is slow."""
_GROUPS_TILE = 128
"""Number of groups whose context lengths a program of the plan reads at a time."""
_MERGED_ELEMENTS = 8192
"""Number of elements of partial results (float32) that a merging program loads at a time."""
_MERGED_DIMS, _MANY_MERGES = 64, 512
"""Number of dimensions that a merging program computes if tokens · heads is less than `_MANY_MERGES`; else all."""


class _Step(NamedTuple):
    """The tensors and plans that `begin_step` keeps for the calls of the step."""

    page_table: Tensor
    contexts: Tensor
    groups: TokenGroups | None
    units: int
    ranges: Tensor
    parts: Tensor


class AbsorbedAttention:
    """Absorbed attention of groups of up to `tokens` tokens.

    Call `begin_step` once per step, then the object once per layer.

    The only state is the plan of the current step, which is kept for each thread. Each call allocates its result and
    partial results.

    shape   heads, dimensions and scale
    tokens  maximum number of tokens of a group; 1 = every row has one token and is a group
    pdl     launch with programmatic dependent launch (see `triton_launch`)
    choose  the function that returns the plan of a call; tuning and tests pass their own
    """

    def __init__(
        self,
        shape: LatentShape,
        tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        pdl: bool,
        choose: PlanFunction = make_plan,
    ) -> None:
        sms = INTERPRETER_SMS
        if device.type == "cuda":
            sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._shape = shape
        self._pdl = pdl
        self._plan: Plan = choose(shape, tokens, dtype, sms)
        self._heads_tiles = -(-shape.heads * tokens // self._plan.rows)
        self._begun = threading.local()

    def begin_step(
        self, cache: LatentCache, page_table: Tensor, contexts: Tensor, groups: TokenGroups | None = None
    ) -> None:
        """Plan the ranges of a step. Called once before the calls of a step, by the same thread.

        page_table [R, W] int32; contexts [groups] int32, 0 = a group of padding; groups None = each row is a group.

        The planning kernel does not overlap with the kernel before it. The next kernel (`triton_embed.embed`) must not
        overlap with the planning kernel, so that all later kernels see the plan.
        """
        plan, count = self._plan, len(contexts)
        capacity = page_table.shape[1] * cache.shape[4]
        most = count * -(-capacity // plan.block_tokens)
        units = max(1, min(plan.programs // self._heads_tiles, most)) if plan.programs else count * EXACT_SPLITS
        # Zeros, because trial steps (`tandem/engine/cuda/compile_ahead.py`) may leave the launch out.
        planned = torch.zeros(
            units * RANGE_FIELDS.value + count * PART_FIELDS.value, dtype=torch.int32, device=contexts.device
        )
        ranges, parts = planned.split_with_sizes([units * RANGE_FIELDS.value, count * PART_FIELDS.value])
        plan_ranges_kernel[max(units, count),](
            contexts,
            ranges,
            parts,
            count,
            units,
            SPLITS=0 if plan.programs else EXACT_SPLITS,
            LEAST_TILES=EXACT_TOKENS // plan.block_tokens,
            BLOCK_TOKENS=plan.block_tokens,
            GROUPS_TILE=_GROUPS_TILE,
            num_warps=4,
        )
        self._begun.step = _Step(page_table, contexts, groups, units, ranges, parts)

    def __call__(self, q: Tensor, kv_up: Tensor, cache: LatentCache, layer: int, out: Tensor) -> None:
        """Compute attention of the step's tokens to the latents of their rows.

        q      [T, heads, nope + rope], rows may be strided
        kv_up  [heads, nope + v_dim, latent]
        cache  [pages, layers, 1, 1, page_tokens, latent + rope], its last two dimensions contiguous
        out    [T, heads·v_dim], contiguous: the result; zeros for padding
        """
        absorbed = absorb(q, kv_up, self._shape, pdl=self._pdl)
        values_of(self.mix(absorbed, cache, layer), kv_up, out, self._shape, pdl=self._pdl)

    def mix(self, absorbed: Tensor, cache: LatentCache, layer: int) -> Tensor:
        """Return each head's attention-weighted latents [T, heads, latent]; `absorbed` is the result of `absorb`."""
        shape, plan = self._shape, self._plan
        step: _Step = self._begun.step
        codes = codes_of(cache)
        slots = step.units + len(step.contexts)
        partials = torch.empty(
            self._heads_tiles, slots, plan.rows, shape.latent, dtype=torch.float32, device=absorbed.device
        )
        lse = torch.empty(self._heads_tiles, slots, plan.rows, dtype=torch.float32, device=absorbed.device)
        grouped = step.groups is not None
        table, token_groups = (step.parts, step.parts) if step.groups is None else step.groups[:2]
        absorbed_attention_kernel[self._heads_tiles, step.units](
            absorbed,
            codes,
            step.page_table,
            step.contexts,
            table,
            step.ranges,
            partials,
            lse,
            codes.stride(0),
            codes.stride(1) * layer,
            step.page_table.stride(0),
            slots,
            shape.scale * math.log2(math.e),
            GROUPED=grouped,
            HEADS=shape.heads,
            LATENT=shape.latent,
            LATENT_PADDED=max(triton.next_power_of_2(shape.latent), 16),
            ROPE=shape.rope,
            ROPE_PADDED=max(triton.next_power_of_2(shape.rope), 16),
            PAGE_TOKENS=cache.shape[4],
            LARGEST=largest_code(cache),
            BLOCK_TOKENS=plan.block_tokens,
            ROWS=plan.rows,
            PDL=self._pdl,
            WIDE_DOT=INTERPRETED,
            num_warps=plan.warps,
            num_stages=plan.stages,
            launch_pdl=self._pdl,
        )
        tokens = len(absorbed)
        mixed = absorbed.new_empty(tokens, shape.heads, shape.latent)
        dims = triton.next_power_of_2(shape.latent)
        if tokens * shape.heads < _MANY_MERGES:
            dims = min(dims, _MERGED_DIMS)
        merge_kernel[tokens, shape.heads, triton.cdiv(shape.latent, dims)](
            partials,
            lse,
            step.parts,
            table,
            token_groups,
            mixed,
            slots,
            GROUPED=grouped,
            HEADS=shape.heads,
            LATENT=shape.latent,
            ROWS=plan.rows,
            SPLITS_TILE=_MERGED_ELEMENTS // dims,
            DIMS=dims,
            PDL=self._pdl,
            num_warps=4,
            launch_pdl=self._pdl,
        )
        return mixed
