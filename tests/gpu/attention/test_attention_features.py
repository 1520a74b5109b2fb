"""Soft caps, sinks, windows and pages whose heads are outermost on a GPU, against float64.

Prefill attention is flash-attn-4 and the fallback, over the head dims that are served. And the time of decode attention
with a window: it must not grow with what lies before the window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.attention.prefill_attention import AttentionKind, FlashPrefill, PrefillAttention, SdpaPrefill
from tandem.engine.kernels.attention.triton_attention import DecodeAttention
from tandem.engine.kernels.layers import AttentionLayer
from tandem.engine.kernels.rowwise.triton_rope import rope_and_store
from tandem.engine.kernels.triton_launch import overlaps_launches
from tests.kernels import decode_cases, prefill_cases
from tests.kernels.steps import LAYER, Step, assert_as_good, head_major, heads, make_step, with_sinks
from tests.pairwise import pairwise

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GPU = torch.device("cuda")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPES = {
    "gpt-oss": heads(64, 8, 64, window=128),
    "gemma-2": replace(heads(16, 8, 256), softcap=50.0),
    "gemma-2 window": replace(heads(16, 8, 256, window=300), softcap=50.0),
    "gemma-3 window": heads(8, 4, 256, window=1024),
    "strong cap": replace(heads(8, 2, 128), softcap=1.5),
    "narrow": replace(heads(4, 1, 96, window=40), softcap=1.5),
}
ODD_SHAPES = {"80": replace(heads(8, 2, 80), softcap=1.5), "192": heads(8, 2, 192, window=100)}
"""Head dims that flash-attn-4 is not used for."""
SINKS = {"sinks": True, "none": False}
ROWS = [(129, 129), (20, 150), (1, 7), (70, 1333), (300, 300)]
CONTEXTS = [1, 129, 700, 4097]
ALLOWED_GROWTH = 1.3
"""Time with a context of many windows ÷ time with a context of one (issue 24)."""


def made(rows: list[tuple[int, int]], shape: AttentionShape, page_tokens: int, sinks: bool) -> Step:
    step = make_step(rows, shape, page_tokens)
    return with_sinks(step) if sinks else step


def flash(page_tokens: int) -> PrefillAttention:
    pytest.importorskip("flash_attn.cute", reason="needs the package flash-attn-4")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("flash-attn-4 needs a GPU of compute capability 9.0")
    return FlashPrefill(page_tokens, pdl=True)


@pairwise(
    shape=SHAPES, sinks=SINKS, page_tokens=[64, 128], dtype=DTYPES,
    always=[(name, sinks, "128", "bfloat16") for name in SHAPES for sinks in SINKS],
)  # fmt: skip
def test_flash_prefill(shape: AttentionShape, sinks: bool, page_tokens: int, dtype: torch.dtype) -> None:
    if shape.window is not None and page_tokens != 128:
        pytest.skip("the engine computes windows over such pages without flash-attn-4, whose tiles reach beyond them")
    step = made(ROWS, shape, page_tokens, sinks)
    prefill_cases.check(flash(page_tokens), step, dtype, GPU, cache=head_major(step.cache))


@pytest.mark.parametrize("name", ["gpt-oss", "gemma-2 window", "gemma-3 window", "narrow"])
def test_flash_prefill_of_pages_before_the_window_that_other_requests_own(name: str) -> None:
    shape = SHAPES[name]
    assert shape.window is not None
    step = made([(70, 3000), (129, 2600)], shape, 128, sinks=True)
    whole, exact = (prefill_cases.torch_of(step, dtype, GPU) for dtype in (torch.bfloat16, torch.float64))
    for row, (tokens, context) in enumerate(step.rows):
        dead = max(context - tokens - shape.window + 1, 0) // 128
        step.cache[step.layout.page_table[row, :dead].long()] = float("nan")
    assert_as_good(prefill_cases.run(flash(128), step, torch.bfloat16, GPU), whole, exact)


@pairwise(shape=SHAPES | ODD_SHAPES, sinks=SINKS, dtype=DTYPES | {"float32": torch.float32})
def test_fallback_prefill(shape: AttentionShape, sinks: bool, dtype: torch.dtype) -> None:
    step = made(ROWS, shape, 128, sinks)
    prefill_cases.check(SdpaPrefill(), step, dtype, GPU, cache=head_major(step.cache))


@pairwise(
    shape=SHAPES | ODD_SHAPES, sinks=SINKS, page_tokens=[16, 128], dtype=DTYPES | {"float32": torch.float32},
    batch={"one": 1, "few": 4, "many": 300},
)  # fmt: skip
def test_decode(shape: AttentionShape, sinks: bool, page_tokens: int, dtype: torch.dtype, batch: int) -> None:
    contexts = [CONTEXTS[-1]] if batch == 1 else CONTEXTS
    if batch > len(CONTEXTS):
        contexts = [1 + 37 * row % 500 for row in range(batch)]
    step = decode_cases.decode_step(contexts, shape, page_tokens)
    step = with_sinks(step) if sinks else step
    ours = decode_cases.run(decode_cases.attention_of(step, dtype), step, dtype, head_major(step.cache))
    assert_as_good(ours, decode_cases.torch_of(step, dtype), decode_cases.torch_of(step, torch.float64))


def test_no_prompt_with_sinks_waits_for_a_compiler() -> None:
    interface = pytest.importorskip("flash_attn.cute.interface", reason="needs the package flash-attn-4")
    attention = flash(128)
    kinds = [AttentionKind(SHAPES["gpt-oss"], sinks=True), AttentionKind(SHAPES["gemma-2"])]
    attention.compile(kinds, torch.bfloat16, GPU)  # type: ignore[attr-defined]
    compiled = set(interface._flash_attn_fwd.compile_cache.cache)
    for shape, sinks in kinds:
        prefill_cases.run(attention, made(ROWS, shape, 128, sinks), torch.bfloat16, GPU)
    assert set(interface._flash_attn_fwd.compile_cache.cache) == compiled


@pairwise(
    shape={
        "glm-4": replace(heads(32, 2, 128), rotary_dims=64),
        "phi-4": replace(heads(24, 8, 128), rotary_dims=96),
        "olmoe": heads(16, 16, 128),
        "gemma": heads(8, 4, 256),
    },
    norms={"none": None, "heads": "heads", "rows": "rows", "wide": "wide"},
    tokens=[1, 65, 600],
    dtype=DTYPES | {"float32": torch.float32},
)
def test_rope_and_store(shape: AttentionShape, norms: str | None, tokens: int, dtype: torch.dtype) -> None:
    step = make_step([(tokens, tokens + 9)], shape, 128, filled=False)
    groups = (shape.heads, shape.kv_heads) if norms == "rows" else (1, 1)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(n * shape.head_dim, generator=generator).bfloat16().double() for n in groups]
    cache = head_major(step.cache).to(GPU, dtype)
    given = [None, None] if norms is None else [w.to(GPU, torch.float32 if norms == "wide" else dtype) for w in weights]
    layer = AttentionLayer(LAYER, shape, step.rope.to(GPU), *given, norm_eps=1e-5)
    layout = prefill_cases.to_device(step.layout, GPU)
    q = rope_and_store(step.qkv.to(GPU, dtype, copy=True), layer, cache, layout, pdl=overlaps_launches())

    def plain(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        held = step.cache.to(dtype, copy=True)
        norm_weights = [None, None] if norms is None else [w.to(dtype) for w in weights]
        rope = step.rope.to(torch.promote_types(dtype, torch.float32))
        layer = AttentionLayer(LAYER, shape, rope, *norm_weights, norm_eps=1e-5)
        turned = decode_cases.REFERENCE.rope_and_store(step.qkv.to(dtype, copy=True), layer, held, step.layout)
        return turned, held

    (base_q, base), (exact_q, exact) = plain(dtype), plain(torch.float64)
    assert_as_good(q.cpu(), base_q, exact_q)
    written = ~exact.isnan()
    assert torch.equal(cache.cpu().isnan(), ~written)
    assert_as_good(cache.cpu()[written], base[written], exact[written])


@pytest.mark.parametrize(
    "shape",
    [heads(64, 8, 64, window=128), heads(16, 8, 256, window=1024), heads(32, 16, 128, window=1024)],
    ids=["gpt-oss", "gemma-3-12b", "gemma-3-27b"],
)
def test_a_window_costs_the_same_at_any_context(shape: AttentionShape) -> None:
    assert shape.window is not None
    rows, page_tokens, long = 64, 128, 32_768
    seconds = {context: decode_seconds(shape, rows, context, page_tokens) for context in (shape.window, long)}
    growth = seconds[long] / seconds[shape.window]
    print(f"\n{shape}: {1e6 * seconds[shape.window]:.1f} µs → {1e6 * seconds[long]:.1f} µs, {growth:.2f}x")
    assert growth <= ALLOWED_GROWTH


def decode_seconds(shape: AttentionShape, rows: int, context: int, page_tokens: int) -> float:
    """Returns the seconds of one call, averaged over a graph of calls on different layers."""
    layers, columns = 8, -(-context // page_tokens)
    seen = min(columns, -(-(shape.window or context) // page_tokens) + 1)
    pages = rows * seen
    size: tuple[Any, ...] = (pages, shape.kv_heads, layers, 2, page_tokens, shape.head_dim)
    cache = torch.randn(size, device=GPU, dtype=torch.bfloat16).permute(0, 2, 3, 1, 4, 5)
    table = torch.zeros(rows, columns, dtype=torch.int32)
    table[:, columns - seen :] = torch.randperm(pages).view(rows, seen)
    contexts = torch.full((rows,), context, dtype=torch.int32, device=GPU)
    q = torch.randn(rows, shape.heads, shape.head_dim, device=GPU, dtype=torch.bfloat16)
    attention = DecodeAttention(shape, rows, GPU, torch.bfloat16, overlaps_launches(), early=True)
    held = table.to(GPU)

    def step() -> None:
        attention.begin_step(cache, held, contexts)
        held.clone()
        for layer in range(layers):
            attention(q, cache, layer, held, contexts)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(20):
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(begun.elapsed_time(ended))
    return sorted(times)[len(times) // 2] / layers / 1e3
