"""Prefill attention over 8-bit keys and values: the copies in 16 bits, flash-attn-4 over them, and SDPA."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.attention.prefill_attention import FlashPrefill, PrefillAttention, SdpaPrefill
from tandem.engine.kernels.attention.quantized_prefill import QuantizedPrefill, dequantize_pages, make_copies
from tandem.engine.kernels.kv_cache import QuantizedKv, dequantize_kv
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.engine.models.shapes import shape_config
from tests.kernels.attention.test_flash_calls import Flash
from tests.kernels.prefill_cases import REFERENCE, to_device
from tests.kernels.quantized_kv.quantized_caches import moved, quantized
from tests.kernels.steps import LAYER, Step, assert_as_good, heads, make_step, with_sinks
from tests.pairwise import pairwise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 128
PDL = overlaps_launches()
KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
GQA, WINDOWED = heads(4, 2, 64), heads(4, 2, 64, window=40)
SHAPES = {"gqa": GQA, "window": WINDOWED, "capped": replace(GQA, softcap=0.5), "chunks": replace(GQA, chunk=90)}
ROWS = [(1, 300), (1, 2), (5, 5), (9, 200), (129, 129), (3, 128)]


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Flash:
    made = Flash()
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_varlen_func=made))
    return made


def copies_of(pages: int, shape: AttentionShape, page_tokens: int = PAGE, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.full((pages, 2, shape.kv_heads, page_tokens, shape.head_dim), -7.0, dtype=dtype, device=DEVICE)


def run(
    attention: PrefillAttention, step: Step, cache: QuantizedKv, dtype: torch.dtype = torch.float16, first_row: int = 0
) -> Tensor:
    layout = replace(to_device(step.layout, DEVICE), max_cached=step.layout.max_cached)
    held = moved(cache, DEVICE)
    sinks = None if step.sinks is None else step.sinks.to(DEVICE)
    attention.begin_step(held, layout, first_row)
    out = attention(step.q.to(DEVICE, dtype), replace(step.layer, sinks=sinks), held, layout, first_row)
    return out[int(step.layout.row_starts[first_row]) :].flatten(1).cpu()


def torch_of(step: Step, cache: QuantizedKv, dtype: torch.dtype) -> Tensor:
    return REFERENCE.attention(step.q.to(dtype), step.layer, cache, step.layout)


def check(attention: PrefillAttention, step: Step, cache: QuantizedKv, first_row: int = 0) -> None:
    """Checks the error, which is also that of numbers rounded to float16 before they are multiplied."""
    start = int(step.layout.row_starts[first_row])
    baseline, exact = torch_of(step, cache, torch.float16)[start:], torch_of(step, cache, torch.float64)[start:]
    assert_as_good(run(attention, step, cache, first_row=first_row), baseline, exact)


@pairwise(kind=KINDS, page_tokens=[16, 48, 128], head_dim=[64, 80], first_row=[0, 2])
def test_copies_are_the_dequantized_numbers(kind: torch.dtype, page_tokens: int, head_dim: int, first_row: int) -> None:
    step = make_step(ROWS, heads(4, 2, head_dim), page_tokens)
    cache, rows = quantized(step.cache, kind), range(first_row, len(ROWS))
    used = [-(-context // page_tokens) for _, context in ROWS[first_row:]]
    copies = copies_of(sum(used) + 1, step.shape, page_tokens)
    dequantize_pages(moved(cache, DEVICE), LAYER, to_device(step.layout, DEVICE), rows, 0, copies)
    copied, at = copies.cpu(), 0
    for row, pages in zip(rows, used, strict=True):
        ids, context = step.layout.page_table[row, :pages].long(), ROWS[row][1]
        wanted = dequantize_kv(cache.codes[ids, LAYER], cache.scales[ids, LAYER], torch.float16)
        wanted[-1, :, :, context - (pages - 1) * page_tokens :] = 0
        assert torch.equal(copied[at : at + pages], wanted)
        at += pages
    assert (copied[at:] == -7).all()


def test_pages_before_the_window_are_neither_read_nor_written() -> None:
    step = make_step([(9, 400), (130, 300)], WINDOWED, 16)
    cache, copies = quantized(step.cache), copies_of(25 + 19, WINDOWED, 16)
    firsts = [(400 - 9 - 39) // 16, (300 - 130 - 39) // 16]
    for row, first in enumerate(firsts):
        step.layout.page_table[row, :first] = 1 << 30
    layout = to_device(step.layout, DEVICE)
    dequantize_pages(moved(cache, DEVICE), LAYER, layout, range(2), 40, copies)
    unwritten = (copies.cpu() == -7).flatten(1).all(1)
    assert unwritten.tolist() == [number < firsts[0] or 25 <= number < 25 + firsts[1] for number in range(25 + 19)]


def test_pages_before_the_chunk_of_the_first_token_are_neither_read_nor_written() -> None:
    """The first tokens are in chunks that begin at 360 and at 90: on page 22 of the first row, and 5 of the second."""
    step = make_step([(9, 400), (130, 300)], SHAPES["chunks"], 16)
    cache, copies = quantized(step.cache), copies_of(25 + 19, GQA, 16)
    for row, first in enumerate((22, 5)):
        step.layout.page_table[row, :first] = 1 << 30
    layout = to_device(step.layout, DEVICE)
    dequantize_pages(moved(cache, DEVICE), LAYER, layout, range(2), SHAPES["chunks"].window_code, copies)
    unwritten = (copies.cpu() == -7).flatten(1).all(1)
    assert unwritten.tolist() == [number < 22 or 25 <= number < 25 + 5 for number in range(25 + 19)]


def test_what_does_not_fit_is_left_out() -> None:
    step = make_step([(100, 100), (40, 40)], GQA, 16)
    copies = copies_of(10, GQA, 16)
    layout = to_device(step.layout, DEVICE)
    dequantize_pages(moved(quantized(step.cache), DEVICE), LAYER, layout, range(2), 0, copies[:8])
    written = (copies.cpu() != -7).flatten(1).all(1)
    assert written.tolist() == [True] * 8 + [False] * 2


@pairwise(shape=SHAPES, kind=KINDS, first_row=[0, 2], pages={"all": 64, "two rows at a time": 7, "one": 3})
def test_flash_attention_over_the_copies(
    flash: Flash, shape: AttentionShape, kind: torch.dtype, first_row: int, pages: int
) -> None:
    step = make_step(ROWS, shape, PAGE)
    attention = QuantizedPrefill(FlashPrefill(PAGE, PDL), copies_of(pages, shape))
    check(attention, step, quantized(step.cache, kind), first_row)
    calls = 1 if pages == 64 else -(-(len(ROWS) - first_row) // (pages // 3))
    assert len(flash.calls) == (0 if shape.chunk else calls)


def test_sinks(flash: Flash) -> None:
    step = with_sinks(make_step(ROWS, WINDOWED, PAGE))
    check(QuantizedPrefill(FlashPrefill(PAGE, PDL), copies_of(9, WINDOWED)), step, quantized(step.cache))
    assert flash.sinks is not None


def test_short_prompts_next_to_long_contexts_are_one_launch(flash: Flash) -> None:
    step = make_step([(1, 3000), (5, 5), (9, 9)], GQA, PAGE)
    step = replace(step, layout=replace(step.layout, max_cached=0))
    attention = QuantizedPrefill(FlashPrefill(PAGE, PDL), copies_of(2, GQA))
    check(attention, step, quantized(step.cache), first_row=1)
    assert len(flash.calls) == 1


def test_groups_of_layers_share_the_copies(flash: Flash) -> None:
    """Only their pages differ: what begins a step for the first group is right for all."""
    step = make_step(ROWS, GQA, PAGE)
    other = make_step(ROWS, GQA, PAGE, seed=1)
    attention = QuantizedPrefill(FlashPrefill(PAGE, PDL), copies_of(64, GQA))
    caches = [moved(quantized(case.cache), DEVICE) for case in (step, other)]
    layouts = [replace(to_device(case.layout, DEVICE), group=group) for group, case in enumerate((step, other))]
    for group in (1, 0):
        attention.begin_step(caches[group], layouts[group], 0)
    for group, case in enumerate((step, other)):
        out = attention(case.q.to(DEVICE, torch.float16), case.layer, caches[group], layouts[group], 0)
        cache = quantized(case.cache)
        baseline, exact = torch_of(case, cache, torch.float16), torch_of(case, cache, torch.float64)
        assert_as_good(out.flatten(1).cpu(), baseline, exact)


@pairwise(shape=SHAPES, kind=KINDS, page_tokens=[16, 128], first_row=[0, 2])
def test_sdpa(shape: AttentionShape, kind: torch.dtype, page_tokens: int, first_row: int) -> None:
    step = make_step(ROWS, shape, page_tokens)
    check(SdpaPrefill(), step, quantized(step.cache, kind), first_row)


def test_copies_hold_the_longest_context() -> None:
    short, long = shape_config("llama-3-8b"), replace(shape_config("llama-3-8b"), max_context=131072)
    meta = torch.device("meta")
    assert make_copies(short, 128, torch.bfloat16, meta).shape == (256, 2, 8, 128, 128)
    assert make_copies(long, 128, torch.bfloat16, meta).shape == (1024, 2, 8, 128, 128)
