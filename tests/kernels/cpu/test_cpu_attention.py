"""Attention, rotary embedding and the KV store against float64, on shuffled pages with NaN in all unwritten memory."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.cpu.kernels import CpuKernels
from tandem.engine.kernels.reference import ReferenceKernels
from tests.kernels.steps import LAYER, Step, assert_as_good, head_major, heads, make_step, row_alone, with_sinks
from tests.pairwise import pairwise

REFERENCE = ReferenceKernels()
SHAPES = {
    "gqa": heads(9, 3, 64),
    "mqa": heads(20, 1, 64),
    "mha": heads(3, 3, 128),
    "odd": heads(4, 2, 80),
    "tail": heads(4, 2, 24),
    "window": heads(6, 2, 64, window=100),
    "narrow": heads(2, 1, 64, window=5),
    "chunks": replace(heads(6, 2, 64), chunk=100),
    "long chunks": replace(heads(2, 1, 64), chunk=512),
}
STEPS = {
    "decode": [(1, 1), (1, 15), (1, 16), (1, 17), (1, 127), (1, 129), (1, 1025)],
    "prompts": [(1, 1), (15, 15), (16, 16), (17, 17), (129, 129)],
    "chunks": [(17, 127), (1, 1025), (7, 513), (33, 300), (2, 3)],
    "long": [(257, 1025)],
}
EDGES = [
    ("long", "narrow", "16", "bfloat16"),
    ("chunks", "window", "16", "bfloat16"),
    ("decode", "tail", "16", "bfloat16"),
]
"""Windows that begin within a page after unseen ones, and a head that fills no vector of bfloat16."""
NAMED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def attend(kernels: Kernels, step: Step, dtype: torch.dtype) -> Tensor:
    return kernels.attention(step.q.to(dtype), step.layer, step.cache_as(dtype), step.layout)


@pairwise(rows=STEPS, shape=SHAPES, page_tokens=[16, 128], dtype=NAMED_DTYPES, always=EDGES)
def test_attention_is_as_exact_as_torch(
    rows: list[tuple[int, int]], shape: AttentionShape, page_tokens: int, kernels: CpuKernels, dtype: torch.dtype
) -> None:
    step = make_step(rows, shape, page_tokens)
    assert_as_good(attend(kernels, step, dtype), attend(REFERENCE, step, dtype), attend(REFERENCE, step, torch.float64))


CAPPED = {
    "capped": replace(heads(6, 2, 64), softcap=1.5),
    "capped window": replace(heads(20, 1, 64, window=100), softcap=1.5),
    "weakly": replace(heads(4, 2, 24), softcap=50.0),
    "window": SHAPES["window"],
}


@pairwise(rows=STEPS, shape=CAPPED, sinks={"sinks": True, "none": False}, page_tokens=[16, 128], dtype=NAMED_DTYPES)
def test_soft_caps_and_sinks(  # noqa: PLR0917
    rows: list[tuple[int, int]],
    shape: AttentionShape,
    sinks: bool,
    page_tokens: int,
    kernels: CpuKernels,
    dtype: torch.dtype,
) -> None:
    plain = make_step(rows, shape, page_tokens)
    step = with_sinks(plain) if sinks else plain
    assert_as_good(attend(kernels, step, dtype), attend(REFERENCE, step, dtype), attend(REFERENCE, step, torch.float64))


def test_a_sink_counts_once_in_a_row_of_many_blocks(kernels: CpuKernels, dtype: torch.dtype) -> None:
    step = with_sinks(make_step([(1, 1025), (1, 257)], heads(2, 1, 64)))
    assert step.sinks is not None
    step = replace(step, sinks=step.sinks + 12)
    ours, exact = attend(kernels, step, dtype), attend(REFERENCE, step, torch.float64)
    torch.testing.assert_close(ours.double(), exact, rtol=0.02, atol=float(exact.abs().max()) * 1e-2)


def test_pages_whose_heads_are_outermost(kernels: CpuKernels, dtype: torch.dtype) -> None:
    step = make_step([(1, 300), (17, 60)], SHAPES["gqa"])
    turned = replace(step, cache=head_major(step.cache))
    assert not turned.cache_as(dtype).is_contiguous()
    assert torch.equal(attend(kernels, turned, dtype), attend(kernels, step, dtype))


@pytest.mark.parametrize("batch", [1, 3, 7, 8, 9, 17])
def test_batches_of_every_size(batch: int, kernels: CpuKernels, dtype: torch.dtype) -> None:
    step = make_step([(1, 1 + 37 * row) for row in range(batch)], SHAPES["gqa"], page_tokens=7, seed=batch)
    assert_as_good(attend(kernels, step, dtype), attend(REFERENCE, step, dtype), attend(REFERENCE, step, torch.float64))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_row_is_the_same_alone_and_in_any_step(
    shape: AttentionShape, kernels: CpuKernels, dtype: torch.dtype
) -> None:
    rows = [(1, 300), (1, 1025), (40, 90), (1, 17), (3, 600)]
    step = make_step(rows, shape)
    together, q, cache = attend(kernels, step, dtype), step.q.to(dtype), step.cache_as(dtype)
    for number in range(len(rows)):
        mine, alone = row_alone(step.layout, number)
        assert torch.equal(kernels.attention(q[mine], step.layer, cache, alone), together[mine])


def test_large_scores_do_not_overflow(kernels: CpuKernels, dtype: torch.dtype) -> None:
    step = make_step([(1, 700), (20, 300)], SHAPES["gqa"])
    q = (step.q * 200).to(dtype)
    exact = REFERENCE.attention(q.double(), step.layer, step.cache, step.layout)
    ours = kernels.attention(q, step.layer, step.cache_as(dtype), step.layout)
    assert_as_good(ours, REFERENCE.attention(q, step.layer, step.cache_as(dtype), step.layout), exact)


ROTATED = SHAPES | {"partial": replace(heads(4, 2, 80), rotary_dims=20)}


@pairwise(
    shape=ROTATED,
    normed={"plain": None, "qk_norm": torch.bfloat16, "wide": torch.float32},
    head_major_pages={"heads outermost": True, "layers outermost": False},
    dtype=NAMED_DTYPES,
)
def test_rope_and_store(
    shape: AttentionShape,
    normed: torch.dtype | None,
    head_major_pages: bool,
    kernels: CpuKernels,
    dtype: torch.dtype,
) -> None:
    step = make_step([(1, 1), (17, 33), (1, 500), (129, 129)], shape, filled=False)
    norms = [torch.linspace(0.5, 1.5, shape.head_dim).bfloat16().double() for _ in range(2)] if normed else [None, None]

    def store(kernels: Kernels, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cache = step.cache_as(dtype)
        cache = head_major(cache) if head_major_pages else cache.clone()
        norm_dtype = torch.float32 if normed is torch.float32 and dtype is torch.bfloat16 else dtype
        q_norm, k_norm = (None if norm is None else norm.to(norm_dtype) for norm in norms)
        qkv = step.qkv.to(dtype, copy=True)
        q = kernels.rope_and_store(qkv, replace(step.layer, q_norm=q_norm, k_norm=k_norm), cache, step.layout)
        return q, cache

    (ours_q, ours), (torch_q, baseline) = store(kernels, dtype), store(REFERENCE, dtype)
    exact_q, exact = store(REFERENCE, torch.float64)
    assert_as_good(ours_q, torch_q, exact_q)
    assert torch.equal(ours.isnan(), exact.isnan()), "memory outside of this step's slots was written"
    assert torch.equal(ours[:, :, 1].nan_to_num(), baseline[:, :, 1].nan_to_num()), "values are stored as they are"
    written = ~exact[:, LAYER, 0].isnan()
    assert_as_good(ours[:, LAYER, 0][written], baseline[:, LAYER, 0][written], exact[:, LAYER, 0][written])


def test_attention_reads_a_view_of_qkv(kernels: CpuKernels, dtype: torch.dtype) -> None:
    step = make_step([(1, 40), (5, 60)], SHAPES["gqa"])
    width = step.shape.heads * step.shape.head_dim
    qkv = torch.cat((step.q.flatten(1), torch.zeros(len(step.q), 64)), dim=1).to(dtype)
    view = qkv[:, :width].view(len(step.q), step.shape.heads, step.shape.head_dim)
    assert torch.equal(
        kernels.attention(view, step.layer, step.cache_as(dtype), step.layout), attend(kernels, step, dtype)
    )
