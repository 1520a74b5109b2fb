"""Triton's decode attention over 8-bit keys and values against float64 over the same codes.

Scales that were never written are NaN.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.attention.triton_attention import DecodeAttention
from tandem.engine.kernels.attention.triton_attention_plan import PlanFunction
from tandem.engine.kernels.kv_cache import QuantizedKv
from tests.kernels.decode_cases import (
    DEVICE,
    NO_PAGE,
    ON_GPU,
    REFERENCE,
    SHAPES,
    attend,
    attention_of,
    decode_step,
    fixed,
    rows_of,
)
from tests.kernels.quantized_kv.quantized_caches import moved, quantized
from tests.kernels.steps import LAYER, Step, assert_as_good, heads, with_sinks
from tests.pairwise import pairwise

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
DTYPES = {"float32": torch.float32, "float16": torch.float16} | ({"bfloat16": torch.bfloat16} if ON_GPU else {})
LENGTHS = [1, 127, 128, 129]
LUCK = 4
"""Scores and weights are rounded otherwise than by PyTorch, which dequantizes before it multiplies."""


def run(attention: DecodeAttention, step: Step, cache: QuantizedKv, dtype: torch.dtype) -> Tensor:
    q, sinks = step.q.to(DEVICE, dtype), None if step.sinks is None else step.sinks.to(DEVICE)
    out = attend(attention, q, moved(cache, DEVICE), LAYER, *rows_of(step), sinks=sinks)
    assert out.dtype == dtype
    assert not attention._counters.any()
    return out.cpu()


def torch_of(step: Step, cache: QuantizedKv, dtype: torch.dtype) -> Tensor:
    return REFERENCE.attention(step.q.to(dtype), step.layer, cache, step.layout)


def check(
    step: Step,
    kind: torch.dtype,
    dtype: torch.dtype,
    cache: QuantizedKv | None = None,
    times: float = LUCK,
    **options: object,
) -> None:
    cache = quantized(step.cache, kind) if cache is None else cache
    ours = run(attention_of(step, dtype, kv_dtype=kind, **options), step, cache, dtype)
    assert_as_good(ours, torch_of(step, cache, dtype), torch_of(step, cache, torch.float64), times)


@pairwise(
    shape=SHAPES | {"capped": replace(heads(6, 2, 64), softcap=1.5), "odd": heads(4, 2, 80)},
    page_tokens=[16, 48, 128],
    kind=KINDS,
    dtype=DTYPES,
)
def test_as_exact_as_torch(shape: AttentionShape, page_tokens: int, kind: torch.dtype, dtype: torch.dtype) -> None:
    check(decode_step([*LENGTHS, 4097] if ON_GPU else LENGTHS, shape, page_tokens), kind, dtype)


@pairwise(kind=KINDS, dtype=DTYPES)
def test_sinks(kind: torch.dtype, dtype: torch.dtype) -> None:
    check(with_sinks(decode_step([1, 33, 700], SHAPES["window"], 64)), kind, dtype, choose=fixed(splits=7))
    check(with_sinks(decode_step([1, 33, 700], SHAPES["gqa"], 64)), kind, dtype, choose=fixed(units=12))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_sinks_far_above_the_scores_of_small_values(kind: torch.dtype) -> None:
    """Weights are small beside the sink's, and so are scales: their product must not leave float16's range."""
    step = with_sinks(decode_step([300, 17], SHAPES["gqa"], 16))
    assert step.sinks is not None
    step = replace(step, sinks=step.sinks.abs() + 8, cache=step.cache * torch.tensor([1.0, 1e-3])[:, None, None, None])
    check(step, kind, torch.float16, choose=fixed(splits=3))


@pairwise(choose={"7 splits": fixed(splits=7), "12 units": fixed(units=12)}, early=[True, False], kind=KINDS)
def test_any_number_of_programs(choose: PlanFunction, early: bool, kind: torch.dtype) -> None:
    check(decode_step([1, 300, *[5, 33] * 4, 129], SHAPES["mqa"], 16), kind, torch.float16, choose=choose, early=early)


def test_pages_before_the_window_may_be_gone() -> None:
    step = decode_step([700, 500], SHAPES["window"], page_tokens=16)
    cache = quantized(step.cache)
    baseline, exact = torch_of(step, cache, torch.float16), torch_of(step, cache, torch.float64)
    for row, (_, context) in enumerate(step.rows):
        step.layout.page_table[row, : (context - 100) // 16] = NO_PAGE
    ours = run(attention_of(step, kv_dtype=torch.int8), step, cache, torch.float16)
    assert_as_good(ours, baseline, exact, LUCK)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_values_and_queries_of_any_size(kind: torch.dtype) -> None:
    """Weights times scales, and the queries themselves, would leave float16's range.

    A GPU's matrix units add float32 products of three parts, whose last digits these scores enlarge.
    """
    step = decode_step([300, 17], SHAPES["gqa"], 16)
    tokens = torch.logspace(-6, 6, step.cache.shape[4]).double()[:, None]
    cache = quantized(step.cache * torch.stack((tokens.flip(0) * 0 + 1e-5, tokens))[:, None], kind)
    step = replace(step, q=step.q * 1e5)
    check(step, kind, torch.float32, cache, times=2 * LUCK if ON_GPU else LUCK)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_values_that_are_all_zero(kind: torch.dtype) -> None:
    """Their scale is 0, and their weight counts."""
    step = decode_step([200, 3], SHAPES["gqa"], 16)
    held = step.cache.clone()
    held[:, :, 1, :, ::3] = torch.where(held[:, :, 1, :, ::3].isnan(), float("nan"), 0.0)
    check(step, kind, torch.float16, quantized(held, kind))


def test_a_scale_that_is_not_a_number_is_in_the_result() -> None:
    step = decode_step([200, 3], SHAPES["gqa"], 16)
    for part in range(2):
        cache = quantized(step.cache)
        cache.scales[step.layout.page_table[0, 1], LAYER, part, 0, 5] = float("nan")
        out = run(attention_of(step, kv_dtype=torch.int8), step, cache, torch.float16).view(2, 9, 64)
        assert out[0, :3].isnan().all()
        assert not out[0, 3:].isnan().any()
        assert not out[1].isnan().any()


@pytest.mark.parametrize("units", [1, 7])
def test_padded_rows_read_nothing_and_give_zeros(units: int) -> None:
    step = decode_step([129, 17], SHAPES["gqa"], page_tokens=16)
    cache, padding = quantized(step.cache), 2
    table = torch.cat((step.layout.page_table, torch.full((padding, step.layout.page_table.shape[1]), NO_PAGE).int()))
    contexts = torch.cat((step.layout.context_lens, torch.zeros(padding).int()))
    q = torch.cat((step.q, torch.full_like(step.q[:padding], float("nan")))).to(DEVICE, torch.float16)
    attention = attention_of(step, choose=fixed(units), kv_dtype=torch.int8)
    out = attend(attention, q, moved(cache, DEVICE), LAYER, table.to(DEVICE), contexts.to(DEVICE)).cpu()
    assert not out[2:].any()
    baseline, exact = torch_of(step, cache, torch.float16), torch_of(step, cache, torch.float64)
    assert_as_good(out[:2], baseline, exact, LUCK)


@pytest.mark.parametrize("choose", [fixed(units=7), fixed(splits=8)], ids=["units", "splits"])
def test_repeated_calls_give_the_same_bits(choose: PlanFunction) -> None:
    step = decode_step([700 if ON_GPU else 300, 33], SHAPES["gqa"], page_tokens=16)
    cache, attention = quantized(step.cache), attention_of(step, choose=choose, kv_dtype=torch.int8)
    first = run(attention, step, cache, torch.float16)
    for _ in range(50 if ON_GPU else 1):
        assert torch.equal(run(attention, step, cache, torch.float16), first)


def test_another_cache_than_the_scratch_is_refused() -> None:
    step = decode_step([3], SHAPES["gqa"], 16)
    with pytest.raises(ValueError, match=r"a cache of torch\.float8_e4m3fn, but scratch for torch\.int8"):
        run(attention_of(step, kv_dtype=torch.int8), step, quantized(step.cache, torch.float8_e4m3fn), torch.float16)
