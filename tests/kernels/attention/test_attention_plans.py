"""The number of programs and the scratch of a step of decode attention, and the isolation of concurrent steps."""

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Thread
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor

from tandem.engine.kernels.attention import triton_attention
from tandem.engine.kernels.attention.triton_attention import DecodeAttention
from tandem.engine.kernels.attention.triton_attention_plan import (
    LARGE_TILE,
    NARROW_TILE,
    ROUNDS_TILE,
    SMALL_TILE,
    Plan,
    make_plan,
)
from tests.kernels.decode_cases import DEVICE, SHAPES, attention_of, check, decode_step, rows_of, run, torch_of
from tests.kernels.steps import LAYER, assert_as_good, heads


@pytest.mark.parametrize(
    ("rows", "tile", "units"),
    [
        (2, SMALL_TILE, 32),
        (24, SMALL_TILE, 33),
        (32, SMALL_TILE, 32),
        (33, SMALL_TILE, 33),
        (44, LARGE_TILE, 33),
        (65, LARGE_TILE, 33),
        (66, ROUNDS_TILE, 66),
        (256, ROUNDS_TILE, 66),
    ],
)
def test_as_many_programs_as_run_at_a_time_or_twice_as_many(rows: int, tile: Plan, units: int) -> None:
    """8 key heads of 128 allow 264 resident programs, 33 of each."""
    assert make_plan(rows, 8, 128, 8192, torch.bfloat16, 132) == replace(tile, units=units)


@pytest.mark.parametrize(
    ("rows", "tile", "units"),
    [(12, SMALL_TILE, 33), (44, NARROW_TILE, 66), (131, NARROW_TILE, 66), (132, NARROW_TILE, 132)],
)
def test_narrow_heads_have_more_programs(rows: int, tile: Plan, units: int) -> None:
    assert make_plan(rows, 8, 64, 8192, torch.bfloat16, 132) == replace(tile, units=units)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 2, 44, 66, 256])
def test_codes_have_as_many_programs_of_longer_tiles(rows: int, head_dim: int, dtype: torch.dtype) -> None:
    plain, codes = (make_plan(rows, 8, head_dim, 8192, cache_dtype, 132) for cache_dtype in (torch.bfloat16, dtype))
    assert (codes.units, codes.splits) == (plain.units, plain.splits)
    assert codes.block_tokens >= 2 * plain.block_tokens or plain.block_tokens == 128


def test_heads_that_large_tiles_do_not_fit_have_one_round_of_small_ones() -> None:
    assert make_plan(256, 8, 256, 8192, torch.bfloat16, 132) == replace(SMALL_TILE, units=33)


def test_few_rows_have_no_more_programs_than_can_be_merged() -> None:
    assert make_plan(1, 1, 128, 1 << 17, torch.bfloat16, 132).splits == 32
    assert make_plan(3, 1, 128, 1 << 17, torch.bfloat16, 132).units == 96
    assert make_plan(1, 8, 128, 100, torch.bfloat16, 132).splits == 4


@pytest.mark.parametrize("page_tokens", [1, 16, 100])
def test_a_plan_fits_any_table(page_tokens: int) -> None:
    shape = heads(2, 2, 64)
    for rows in (1, 7, 40):
        step = decode_step([3] * rows, shape, page_tokens)
        check(step, torch.float16)


def test_too_many_rows_are_refused() -> None:
    step = decode_step([1, 2], SHAPES["gqa"], page_tokens=16)
    with pytest.raises(ValueError, match="2 rows"):
        run(DecodeAttention(step.shape, 1, DEVICE, torch.float32, pdl=False), step, torch.float32)


def test_a_cache_of_another_dtype_is_refused() -> None:
    """A cache of another dtype may be cut into more ranges than the scratch holds."""
    step = decode_step([1, 2], SHAPES["gqa"], page_tokens=16)
    with pytest.raises(ValueError, match=r"a cache of torch.float32, but scratch for torch.float16"):
        run(attention_of(step, torch.float16), step, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "window", "partials"),
    [(torch.bfloat16, None, 256 + 66), (torch.float32, None, 256 * 8), (torch.float32, 1024, 256 * 2)],
)
def test_scratch_is_what_the_steps_of_this_dtype_need(
    dtype: torch.dtype, window: int | None, partials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama-3-8B on a GPU of 132 multiprocessors needs 5.3 MB for bfloat16, 33.6 MB for float32."""
    monkeypatch.setattr(triton_attention, "INTERPRETER_SMS", 132)
    attention = DecodeAttention(heads(32, 8, 128, window), 256, torch.device("cpu"), dtype, pdl=False)
    assert attention._partials.shape == (partials * 32, 128)
    assert attention._partial_lse.shape == (partials * 32,)


def test_steps_of_two_threads_do_not_mix() -> None:
    """Trial steps that are compiled concurrently run on several threads."""
    attention = attention_of(decode_step([5], SHAPES["gqa"], 16), max_rows=3)
    few, many = decode_step([70], SHAPES["gqa"], 16), decode_step([5, 90, 33], SHAPES["gqa"], 16)
    attention.begin_step(many.cache_as(torch.float16).to(DEVICE), *rows_of(many))
    with ThreadPoolExecutor(1) as other:
        ours = other.submit(run, attention, few, torch.float16).result()
    assert_as_good(ours, torch_of(few, torch.float16), torch_of(few, torch.float64))
    cache = many.cache_as(torch.float16).to(DEVICE)
    ours = attention(many.q.to(DEVICE, torch.float16), cache, LAYER, *rows_of(many)).cpu()
    assert_as_good(ours, torch_of(many, torch.float16), torch_of(many, torch.float64))


def test_what_a_graph_reads_outlives_the_thread_that_captured_it() -> None:
    step = decode_step([5, 90, 33], SHAPES["gqa"], 16)
    attention = attention_of(step)
    tile_ranges: list[ReferenceType[Tensor]] = []

    def begin() -> None:
        attention.begin_step(step.cache_as(torch.float16).to(DEVICE), *rows_of(step))
        tile_ranges.append(ref(attention._begun.step.tile_ranges))

    capturing = Thread(target=begin)
    capturing.start()
    capturing.join()
    gc.collect()
    assert tile_ranges[0]() is not None


def test_steps_with_wider_and_wider_tables() -> None:
    """Steps with wider tables have more programs, and each has its own record."""
    attention = attention_of(decode_step([5], heads(2, 1, 64), 16))
    units = []
    for longest in (20, 200, 700):
        step = decode_step([longest, 33], heads(2, 1, 64), 16)
        assert_as_good(
            run(attention, step, torch.float16), torch_of(step, torch.float16), torch_of(step, torch.float64)
        )
        begun = attention._begun.step
        assert len(begun.tile_ranges) == begun.plan.units
        units.append(begun.plan.units)
    assert units == sorted(set(units)), "or this shows nothing"


def test_a_step_begins_before_its_layers() -> None:
    step = decode_step([1, 2], SHAPES["gqa"], page_tokens=16)
    attention, cache = attention_of(step), step.cache_as(torch.float16).to(DEVICE)
    table, contexts = rows_of(step)
    attention.begin_step(cache, table[:1], contexts[:1])
    with pytest.raises(ValueError, match="2 rows of a step that began with others"):
        attention(step.q.to(DEVICE, torch.float16), cache, LAYER, table, contexts)
