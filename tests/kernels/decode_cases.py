"""Steps of decode attention and their checks: shuffled pages, NaN in all memory that was never written."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.attention.triton_attention import DecodeAttention
from tandem.engine.kernels.attention.triton_attention_plan import Plan, PlanFunction
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.kernels.triton_launch import overlaps_launches

from .steps import LAYER, Step, assert_as_good, heads, make_step

REFERENCE = ReferenceKernels()
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
NO_PAGE = 1 << 30
"""A page id that no cache has: reading it faults, or is detected by the interpreter."""
SHAPES = {
    "gqa": heads(9, 3, 64),
    "mqa": heads(8, 1, 128),
    "mha": heads(4, 4, 96),
    "wide": heads(4, 2, 256),
    "widest": heads(4, 2, 512),
    "many": heads(20, 1, 64),
    "window": heads(6, 2, 64, window=100),
    "narrow": heads(2, 1, 64, window=5),
    "chunks": replace(heads(6, 2, 64), chunk=50),
}


def decode_step(lengths: list[int], shape: AttentionShape, page_tokens: int, seed: int = 0) -> Step:
    """Returns rows of one token; table entries after a row's context name no page."""
    step = make_step([(1, length) for length in lengths], shape, page_tokens, seed)
    for row, length in enumerate(lengths):
        step.layout.page_table[row, -(-length // page_tokens) :] = NO_PAGE
    return step


def attention_of(step: Step, dtype: torch.dtype = torch.float16, max_rows: int = 8, **options: Any) -> DecodeAttention:
    most = max(max_rows, len(step.rows))
    return DecodeAttention(step.shape, most, DEVICE, dtype, overlaps_launches(), **options)


def attend(
    attention: DecodeAttention, q: Tensor, cache: Tensor, layer: int, *rows: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Computes attention; `rows`: their page tables and contexts."""
    attention.begin_step(cache, *rows)
    rows[0].clone()  # overlaps no launch, as the embedding between them
    return attention(q, cache, layer, *rows, sinks=sinks)


def rows_of(step: Step) -> tuple[Tensor, Tensor]:
    return step.layout.page_table.to(DEVICE), step.layout.context_lens.to(DEVICE)


def run(attention: DecodeAttention, step: Step, dtype: torch.dtype, cache: Tensor | None = None) -> Tensor:
    held = (step.cache if cache is None else cache).to(DEVICE, dtype)
    sinks = None if step.sinks is None else step.sinks.to(DEVICE)
    out = attend(attention, step.q.to(DEVICE, dtype), held, LAYER, *rows_of(step), sinks=sinks)
    assert out.dtype == dtype
    assert not attention._counters.any()
    return out.cpu()


def torch_of(step: Step, dtype: torch.dtype) -> Tensor:
    return REFERENCE.attention(step.q.to(dtype), step.layer, step.cache_as(dtype), step.layout)


def check(step: Step, dtype: torch.dtype, **options: Any) -> None:
    ours = run(attention_of(step, dtype, **options), step, dtype)
    assert_as_good(ours, torch_of(step, dtype), torch_of(step, torch.float64))


def fixed(units: int = 0, splits: int = 1) -> PlanFunction:
    """Returns a replacement of the plan function that always returns the same plan."""
    return lambda *_: Plan(block_tokens=32, warps=4, stages=2, units=units, splits=splits)
