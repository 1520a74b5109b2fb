"""Latent attention on a GPU against float64: absorbed, expanded by flash-attn-4 and PyTorch, and in captured graphs.

All memory of the cache that was never written is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.engine.config.attention import LatentShape
from tandem.engine.kernels.latent.block_attention import (
    BlockAttention,
    FlashBlocks,
    PlainBlocks,
    choose_block_attention,
)
from tandem.engine.kernels.latent.latent_kernels import LatentKernels
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.kernels.triton_launch import overlaps_launches
from tests.kernels.latent.latent_steps import LAYER, TINY, LatentStep, make_latent_step
from tests.kernels.steps import assert_as_good

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GPU = torch.device("cuda")
REFERENCE = ReferenceKernels()
SHAPES = {
    "deepseek-v2-lite": LatentShape(heads=16, latent=512, rope=64, nope=128, v_dim=128, scale=192**-0.5),
    "deepseek-v3": LatentShape(heads=128, latent=512, rope=64, nope=128, v_dim=128, scale=192**-0.5),
    "wide values": LatentShape(heads=20, latent=512, rope=64, nope=192, v_dim=256, scale=256**-0.5),
    "narrow": LatentShape(heads=40, latent=256, rope=32, nope=64, v_dim=64, scale=96**-0.5),
    "tiny": TINY,
}
ROWS = {
    "decode": [(1, 1), (1, 700), (1, 33), (1, 0), (1, 2049), (1, 128)],
    "one long": [(1, 5000)],
    "many": [(1, 100 + 7 * row) for row in range(150)],
    "chunks": [(1, 300), (1, 0), (100, 900), (7, 7), (33, 161)],
    "prompts": [(1, 300), (300, 300), (1, 40), (257, 600), (2, 2)],
    "a long context": [(1, 40), (200, 9500)],
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def kernels_of(shape: LatentShape, dtype: torch.dtype, blocks: BlockAttention | None = None) -> LatentKernels:
    chosen: Future[BlockAttention] = Future()
    chosen.set_result(blocks or choose_block_attention(GPU, dtype, [shape]))
    return LatentKernels([shape], (), GPU, dtype, overlaps_launches(), chosen)


def run(step: LatentStep, blocks: BlockAttention | None = None) -> Tensor:
    """Computes a step whose queries are rotated and whose latents are stored already."""
    kernels, single = kernels_of(step.shape, step.q.dtype, blocks), step.layout.single_rows
    kernels.begin_step(step.held, step.layout, single)
    return kernels.attention(step.queries, step.layer, step.held, step.layout, single)


def reference(step: LatentStep) -> Tensor:
    return REFERENCE.latent_attention(step.queries, step.layer, step.held, step.layout)


def check(step: LatentStep, dtype: torch.dtype, blocks: BlockAttention | None = None) -> None:
    """Checks that the error is at most twice that of PyTorch in the same dtype, both against float64.

    In float32, where little is rounded, it may be eight times as large: absorbed products sum in another order.
    """
    real = torch.cat([torch.full((tokens,), context > 0) for tokens, context in step.rows]).to(GPU)
    there = step.to(dtype, GPU)
    exact, times = reference(step.to(torch.float64, GPU))[real], 8 if dtype is torch.float32 else 2
    assert_as_good(run(there, blocks)[real], reference(there)[real], exact, times)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_as_exact_as_torch(rows: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
    check(make_latent_step(rows, SHAPES["deepseek-v2-lite"], page_tokens=128), dtype)


@pytest.mark.parametrize("rows", ["decode", "chunks", "prompts"])
@pytest.mark.parametrize("shape", list(SHAPES)[1:])
def test_every_shape(shape: str, rows: str) -> None:
    check(make_latent_step(ROWS[rows], SHAPES[shape], page_tokens=128), torch.bfloat16)


@pytest.mark.parametrize("rows", ["decode", "chunks", "prompts"])
@pytest.mark.parametrize("page_tokens", [16, 48, 64])
def test_every_page_size(page_tokens: int, rows: str) -> None:
    check(make_latent_step(ROWS[rows], SHAPES["deepseek-v2-lite"], page_tokens=page_tokens), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_8_bit_latents(rows: Sequence[tuple[int, int]], kind: torch.dtype, dtype: torch.dtype) -> None:
    check(make_latent_step(rows, SHAPES["deepseek-v2-lite"], page_tokens=128).quantized(kind), dtype)


def test_flash_attn_4_takes_the_dimensions() -> None:
    pytest.importorskip("flash_attn.cute", reason="needs the package flash-attn-4")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("flash-attn-4 needs a GPU of compute capability 9.0")
    shape = SHAPES["deepseek-v2-lite"]
    blocks = FlashBlocks()
    blocks.compile([shape], torch.bfloat16, GPU)
    check(make_latent_step(ROWS["prompts"], shape, page_tokens=128), torch.bfloat16, blocks)


def test_plain_prompts() -> None:
    step = make_latent_step(ROWS["prompts"], SHAPES["deepseek-v2-lite"], page_tokens=128)
    check(step, torch.bfloat16, PlainBlocks())


def test_the_store() -> None:
    step = make_latent_step(ROWS["chunks"], SHAPES["deepseek-v2-lite"], page_tokens=128, filled=False)
    exact, plain, ours = (step.to(dtype, GPU) for dtype in (torch.float64, torch.bfloat16, torch.bfloat16))
    kernels = kernels_of(step.shape, torch.bfloat16)
    real = exact.layout.slots >= 0
    stored = []
    for inputs, store in ((exact, REFERENCE.latent_store), (plain, REFERENCE.latent_store), (ours, kernels.store)):
        # The reference has no padding: its tokens go to the last page, which no row has.
        spare = inputs.cache.shape[0] * inputs.cache.shape[4] - 1
        slots = inputs.layout.slots if inputs is ours else inputs.layout.slots.where(real, spare)
        layout = replace(inputs.layout, slots=slots)
        q = store(inputs.q, inputs.latents, inputs.layer, inputs.cache, layout)
        page, offset = slots[real] // inputs.cache.shape[4], slots[real] % inputs.cache.shape[4]
        stored.append((q[real], inputs.cache[page, LAYER, 0, 0, offset]))
    for actual, baseline, expected in zip(*reversed(stored), strict=True):
        assert_as_good(actual, baseline, expected)


@pytest.mark.parametrize("rows", ["decode", "chunks"])
def test_a_captured_graph_computes_other_steps(rows: str) -> None:
    """A graph is captured over a step of padding, and replayed over steps of other contexts and lengths of rows."""
    shape = SHAPES["deepseek-v2-lite"]
    steps = [make_latent_step(ROWS[rows], shape, page_tokens=128, seed=seed) for seed in range(2)]
    shorter = [(tokens, context // 2 if tokens == 1 else context) for tokens, context in ROWS[rows]]
    steps.append(make_latent_step(shorter, shape, page_tokens=128, seed=3))
    held = steps[0].to(torch.bfloat16, GPU)
    kernels, single = kernels_of(shape, torch.bfloat16), held.layout.single_rows
    width = max(step.layout.page_table.shape[1] for step in steps)
    pages = max(len(step.cache) for step in steps)
    table = torch.zeros(len(ROWS[rows]), width, dtype=torch.int32, device=GPU)
    cache = torch.full((pages, *held.cache.shape[1:]), float("nan"), dtype=torch.bfloat16, device=GPU)
    layout = replace(held.layout, page_table=table)
    layout.context_lens.zero_()
    layout.row_starts[single:] = single

    def compute() -> Tensor:
        kernels.begin_step(cache, layout, single)
        return kernels.attention(held.queries, held.layer, cache, layout, single)

    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    for step in steps:
        there = step.to(torch.bfloat16, GPU)
        table.zero_()
        table[:, : there.layout.page_table.shape[1]] = there.layout.page_table
        cache[: len(there.cache)] = there.cache
        for name in ("row_starts", "context_lens", "positions"):
            getattr(layout, name).copy_(getattr(there.layout, name))
        held.q.copy_(there.q)
        held.kv_up.copy_(there.kv_up)
        graph.replay()
        torch.cuda.synchronize()
        real = torch.cat([torch.full((tokens,), context > 0) for tokens, context in step.rows]).to(GPU)
        assert_as_good(out[real], reference(there)[real], reference(step.to(torch.float64, GPU))[real])
        assert not out[~real].any()


def test_the_same_inputs_give_the_same_bits() -> None:
    step = make_latent_step(ROWS["many"], SHAPES["deepseek-v2-lite"], page_tokens=128).to(torch.bfloat16, GPU)
    first = run(step)
    assert all(torch.equal(run(step), first) for _ in range(5))
