"""Prefill attention over 8-bit KV by flash-attn-4 itself, in bfloat16; in a CUDA graph, too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.attention.prefill_attention import FlashPrefill
from tandem.engine.kernels.attention.quantized_prefill import QuantizedPrefill
from tests.kernels.prefill_cases import BATCHES, ROWS, to_device
from tests.kernels.quantized_kv.quantized_caches import moved, quantized
from tests.kernels.quantized_kv.test_quantized_prefill import run, torch_of
from tests.kernels.steps import assert_as_good, heads, make_step
from tests.pairwise import pairwise

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("default"),
]

GPU = torch.device("cuda")
KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SHAPES = {"gqa": heads(8, 2, 128), "mqa": heads(4, 1, 64), "window": heads(4, 2, 128, window=100)}


def made(shape: AttentionShape, page_tokens: int, pages: int = 64) -> QuantizedPrefill:
    pytest.importorskip("flash_attn.cute", reason="needs the package flash-attn-4")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("flash-attn-4 needs a GPU of compute capability 9.0")
    copies = torch.full(
        (pages, 2, shape.kv_heads, page_tokens, shape.head_dim), float("nan"), dtype=torch.bfloat16, device=GPU
    )
    return QuantizedPrefill(FlashPrefill(page_tokens, pdl=True), copies)


@pairwise(rows=ROWS, shape=SHAPES, kind=KINDS, pages=[64, 5])
def test_as_exact_as_torch(rows: list[tuple[int, int]], shape: AttentionShape, kind: torch.dtype, pages: int) -> None:
    step = make_step(rows, shape, 128)
    cache = quantized(step.cache, kind)
    ours = run(made(shape, 128, pages), step, cache, torch.bfloat16)
    assert_as_good(ours, torch_of(step, cache, torch.bfloat16), torch_of(step, cache, torch.float64))


def test_small_pages() -> None:
    step = make_step(BATCHES["three chunks"], SHAPES["gqa"], 16)
    cache = quantized(step.cache)
    ours = run(made(step.shape, 16), step, cache, torch.bfloat16)
    assert_as_good(ours, torch_of(step, cache, torch.bfloat16), torch_of(step, cache, torch.float64))


def test_one_graph_serves_every_length() -> None:
    step = make_step([(40, 300), (20, 129), (5, 5)], SHAPES["gqa"], 128)
    attention, layout = made(step.shape, 128), replace(to_device(step.layout, GPU), max_context=1024)
    cache, q = moved(quantized(step.cache), GPU), step.q.to(GPU, torch.bfloat16)

    def compute() -> Tensor:
        attention.begin_step(cache, layout, 0)
        return attention(q, step.layer, cache, layout, 0)

    expected = compute().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    for lengths in ([300, 129, 5], [40, 20, 5], [257, 128, 5], [300, 129, 5]):
        layout.context_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, compute())
    assert torch.equal(out, expected)
