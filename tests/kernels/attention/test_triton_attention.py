"""Triton's decode attention against float64, on shuffled pages with NaN in all memory that was never written.

Without a GPU the kernel runs in Triton's interpreter, which rounds to bfloat16 by truncation: errors of bfloat16 are
tested on a GPU only.
"""

import pytest
import torch

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.attention.triton_attention import DecodeAttention
from tandem.engine.kernels.attention.triton_attention_plan import PlanFunction, make_plan
from tandem.engine.kernels.triton_launch import overlaps_launches
from tests.kernels.decode_cases import (
    DEVICE,
    NO_PAGE,
    ON_GPU,
    SHAPES,
    attend,
    attention_of,
    check,
    decode_step,
    fixed,
    rows_of,
    run,
    torch_of,
)
from tests.kernels.steps import LAYER, assert_as_good, heads

DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
LENGTHS = [1, 127, 128, 129]
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="too large for the interpreter")


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.mark.parametrize("page_tokens", [16, 48, 128])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_as_exact_as_torch(shape: AttentionShape, page_tokens: int, dtype: torch.dtype) -> None:
    check(decode_step([*LENGTHS, 4097] if ON_GPU else LENGTHS, shape, page_tokens), dtype)


def test_a_long_context(dtype: torch.dtype) -> None:
    check(decode_step([4097], heads(2, 1, 64), page_tokens=128), dtype)


@pytest.mark.parametrize("batch", [1, 3, pytest.param(257, marks=needs_gpu)])
def test_batches_of_every_size(batch: int, dtype: torch.dtype) -> None:
    check(decode_step([1 + 97 * row % 1500 for row in range(batch)], SHAPES["gqa"], page_tokens=16, seed=batch), dtype)


def test_a_large_batch_of_short_rows(dtype: torch.dtype) -> None:
    """Every row costs the interpreter milliseconds, however short it is."""
    check(decode_step([1 + row % 3 for row in range(257)], heads(2, 1, 64), page_tokens=2), dtype)


@pytest.mark.parametrize("splits", [1, 2, 7, 40])
@pytest.mark.parametrize("shape", [SHAPES["gqa"], SHAPES["window"]], ids=["gqa", "window"])
def test_any_number_of_splits(shape: AttentionShape, splits: int, dtype: torch.dtype) -> None:
    check(decode_step([1, 33, 700], shape, page_tokens=64), dtype, choose=fixed(splits=splits))


@pytest.mark.parametrize("units", [1, 12, 60])
@pytest.mark.parametrize("shape", [SHAPES["mqa"], SHAPES["window"]], ids=["mqa", "window"])
def test_persistent_programs_take_rows_of_all_lengths(shape: AttentionShape, units: int) -> None:
    """There are more rows than a program reads at once."""
    check(decode_step([1, 300, *[5, 33] * 16, 129], shape, 16), torch.float16, choose=fixed(units))


def test_rows_that_are_not_cut_need_no_merging() -> None:
    step = decode_step([256, 200, 250, 256, 199], SHAPES["gqa"], 64)
    attention = attention_of(step, choose=fixed(units=5))
    attention._partials.fill_(float("nan"))
    attention._partial_lse.fill_(float("nan"))
    assert_as_good(run(attention, step, torch.float16), torch_of(step, torch.float16), torch_of(step, torch.float64))
    assert attention._partials.isnan().all()


def test_pages_before_the_window_may_be_gone(dtype: torch.dtype) -> None:
    step = decode_step([700, 500], SHAPES["window"], page_tokens=16)
    baseline, exact = torch_of(step, dtype), torch_of(step, torch.float64)
    for row, (_, context) in enumerate(step.rows):
        step.layout.page_table[row, : (context - 100) // 16] = NO_PAGE
    assert_as_good(run(attention_of(step, dtype), step, dtype), baseline, exact)


def test_layout_read_early(dtype: torch.dtype) -> None:
    check(decode_step(LENGTHS, SHAPES["gqa"], page_tokens=48), dtype, early=True)
    check(decode_step(LENGTHS[3:], SHAPES["gqa"], page_tokens=48), dtype, early=True)


@pytest.mark.skipif(ON_GPU, reason="judged exactly there")
def test_bfloat16_in_the_interpreter() -> None:
    step = decode_step(LENGTHS, SHAPES["gqa"], page_tokens=16)
    ours = run(attention_of(step, torch.bfloat16), step, torch.bfloat16)
    torch.testing.assert_close(ours.double(), torch_of(step, torch.float64), atol=0.03, rtol=0.02)


@pytest.mark.parametrize("units", [None, 1, 2, 7])
def test_padded_rows_read_nothing_and_give_zeros(dtype: torch.dtype, units: int | None) -> None:
    lengths = [129, 17]
    step = decode_step(lengths, SHAPES["gqa"], page_tokens=16)
    layout, padding = step.layout, 2
    table = torch.cat((layout.page_table, torch.full((padding, layout.page_table.shape[1]), NO_PAGE).int()))
    contexts = torch.cat((layout.context_lens, torch.zeros(padding).int()))
    q = torch.cat((step.q, torch.full_like(step.q[:padding], float("nan")))).to(DEVICE, dtype)
    attention = attention_of(step, dtype, choose=make_plan if units is None else fixed(units))
    out = attend(attention, q, step.cache_as(dtype).to(DEVICE), LAYER, table.to(DEVICE), contexts.to(DEVICE)).cpu()
    assert not out[len(lengths) :].any()
    assert_as_good(out[: len(lengths)], torch_of(step, dtype), torch_of(step, torch.float64))


def test_queries_inside_a_stacked_product(dtype: torch.dtype) -> None:
    step = decode_step(LENGTHS, SHAPES["gqa"], page_tokens=16)
    shape, rows = step.shape, len(LENGTHS)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = torch.full((rows, width), float("nan"), dtype=dtype, device=DEVICE)
    q = qkv[:, : shape.heads * shape.head_dim].view(rows, shape.heads, shape.head_dim)
    q.copy_(step.q)
    arguments = (step.cache_as(dtype).to(DEVICE), LAYER, *rows_of(step))
    attention = attention_of(step, dtype)
    assert torch.equal(attend(attention, q, *arguments), attend(attention, q.contiguous(), *arguments))


@pytest.mark.parametrize("choose", [fixed(units=7), fixed(splits=8)], ids=["units", "splits"])
def test_repeated_calls_give_the_same_bits(dtype: torch.dtype, choose: PlanFunction) -> None:
    step = decode_step([700, 33], SHAPES["gqa"], page_tokens=16)
    attention = attention_of(step, dtype, choose=choose)
    first = run(attention, step, dtype)
    for _ in range(50 if ON_GPU else 2):
        assert torch.equal(run(attention, step, dtype), first)


@pytest.mark.parametrize("choose", [fixed(units=7), fixed(splits=8)], ids=["units", "splits"])
def test_what_overlapping_calls_have_counted_is_forgotten(choose: PlanFunction) -> None:
    step = decode_step([700, 33], SHAPES["gqa"], page_tokens=16)
    attention = attention_of(step, choose=choose)
    first = run(attention, step, torch.float16)
    attention._counters.fill_(1)
    with pytest.raises(AssertionError):
        run(attention, step, torch.float16)
    attention.reset()
    assert torch.equal(run(attention, step, torch.float16), first)


@pytest.mark.parametrize("shape", [SHAPES["gqa"], SHAPES["window"]], ids=["gqa", "window"])
def test_a_float32_row_is_the_same_alone_and_in_any_batch(shape: AttentionShape) -> None:
    lengths = [1100, 17, 600, 128, 1]
    step = decode_step(lengths, shape, page_tokens=16)
    together = run(attention_of(step, torch.float32), step, torch.float32)
    cache = step.cache_as(torch.float32).to(DEVICE)
    attention = attention_of(step, torch.float32)
    for row, length in enumerate(lengths):
        table = step.layout.page_table[row : row + 1, : -(-length // 16)].to(DEVICE)
        context = step.layout.context_lens[row : row + 1].to(DEVICE)
        alone = attend(attention, step.q[row : row + 1].to(DEVICE, torch.float32), cache, LAYER, table, context)
        assert torch.equal(alone.cpu()[0], together[row])


@needs_gpu
def test_a_cache_of_more_elements_than_int32_counts() -> None:
    shape, page_tokens, layers = heads(8, 2, 128), 128, 4
    page_elements = layers * 2 * shape.kv_heads * page_tokens * shape.head_dim
    pages = (1 << 31) // page_elements + 8
    page_shape = (layers, 2, shape.kv_heads, page_tokens, shape.head_dim)
    cache = torch.empty(pages, *page_shape, dtype=torch.bfloat16, device=DEVICE)
    small = torch.randn(3, *page_shape, device=DEVICE).bfloat16()
    cache[-3:] = small
    q = torch.randn(1, shape.heads, shape.head_dim, device=DEVICE).bfloat16()
    contexts = torch.tensor([300], dtype=torch.int32, device=DEVICE)
    attention = DecodeAttention(shape, 1, DEVICE, torch.bfloat16, overlaps_launches())
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32, device=DEVICE)
    far = attend(attention, q, cache, 3, table + pages - 3, contexts)
    assert torch.equal(far, attend(attention, q, small, 3, table, contexts))


@pytest.mark.skipif(not ON_GPU, reason="graphs are a GPU's")
def test_one_graph_serves_every_length() -> None:
    shape = SHAPES["gqa"]
    step = decode_step([4000, 2000, 5], shape, page_tokens=128)
    attention = attention_of(step)
    q, cache = step.q.to(DEVICE, torch.float16), step.cache_as(torch.float16).to(DEVICE)
    table, contexts = rows_of(step)
    attend(attention, q, cache, LAYER, table, contexts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(attention, q, cache, LAYER, table, contexts)
    for lengths in ([4000, 2000, 5], [1, 129, 0], [2048, 0, 3]):
        contexts.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, attend(attention, q, cache, LAYER, table, contexts))


def test_a_part_of_a_row_may_be_empty() -> None:
    """Spans of equal length: the last part of a shorter row is empty, and is merged like the others."""
    check(decode_step([316, 300], heads(2, 1, 64), 64), torch.float16, choose=fixed(units=10))
