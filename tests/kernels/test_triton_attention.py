"""Triton's decode attention against float64, on shuffled pages with NaN wherever nothing was written.

Without a GPU the kernel runs in Triton's interpreter, which rounds to bfloat16 by truncation: errors of bfloat16 are
judged on a GPU only.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels import triton_attention
from engine.kernels.base import AttentionShape
from engine.kernels.reference import ReferenceKernels
from engine.kernels.triton_attention import DecodeAttention, Plan, PlanFunction, make_plan
from engine.kernels.triton_attention_kernels import Walk
from engine.kernels.triton_launch import overlaps_launches

from .steps import LAYER, Step, assert_as_good, heads, make_step

REFERENCE = ReferenceKernels()
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
NO_PAGE = 1 << 30
"""A page id that no cache has: reading it faults, or is seen by the interpreter."""
SHAPES = {
    "gqa": heads(9, 3, 64),
    "mqa": heads(8, 1, 128),
    "mha": heads(4, 4, 96),
    "wide": heads(4, 2, 256),
    "many": heads(20, 1, 64),
    "window": heads(6, 2, 64, window=100),
    "narrow": heads(2, 1, 64, window=5),
}
LENGTHS = [1, 127, 128, 129]
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="too large for the interpreter")


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def decode_step(lengths: list[int], shape: AttentionShape, page_tokens: int, seed: int = 0) -> Step:
    """Rows of one token; table entries behind a row's context name no page."""
    step = make_step([(1, length) for length in lengths], shape, page_tokens, seed)
    for row, length in enumerate(lengths):
        step.layout.page_table[row, -(-length // page_tokens) :] = NO_PAGE
    return step


def attention_of(step: Step, dtype: torch.dtype = torch.float16, max_rows: int = 8, **options: Any) -> DecodeAttention:
    most = max(max_rows, len(step.rows))
    return DecodeAttention(step.shape, most, DEVICE, dtype, overlaps_launches(), **options)


def attend(attention: DecodeAttention, q: Tensor, cache: Tensor, layer: int, *rows: Tensor) -> Tensor:
    """`rows`: their page tables and contexts."""
    attention.begin_step(cache, *rows)
    rows[0].clone()  # overlaps no launch, as the embedding between them
    return attention(q, cache, layer, *rows)


def rows_of(step: Step) -> tuple[Tensor, Tensor]:
    return step.layout.page_table.to(DEVICE), step.layout.context_lens.to(DEVICE)


def run(attention: DecodeAttention, step: Step, dtype: torch.dtype) -> Tensor:
    out = attend(attention, step.q.to(DEVICE, dtype), step.cache_as(dtype).to(DEVICE), LAYER, *rows_of(step))
    assert out.dtype == dtype
    assert not attention._counters.any()
    return out.cpu()


def torch_of(step: Step, dtype: torch.dtype) -> Tensor:
    return REFERENCE.attention(step.q.to(dtype), step.cache_as(dtype), LAYER, step.layout, step.shape)


def check(step: Step, dtype: torch.dtype, **options: Any) -> None:
    ours = run(attention_of(step, dtype, **options), step, dtype)
    assert_as_good(ours, torch_of(step, dtype), torch_of(step, torch.float64))


def fixed(units: int = 0, splits: int = 1) -> PlanFunction:
    """A stand-in for the plan function: always the same plan."""
    return lambda *_: Plan(block_tokens=32, warps=4, stages=2, units=units, splits=splits)


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
    """The interpreter takes milliseconds a row, however short it is."""
    check(decode_step([1 + row % 3 for row in range(257)], heads(2, 1, 64), page_tokens=2), dtype)


@pytest.mark.parametrize("splits", [1, 2, 7, 40])
@pytest.mark.parametrize("shape", [SHAPES["gqa"], SHAPES["window"]], ids=["gqa", "window"])
def test_any_number_of_splits(shape: AttentionShape, splits: int, dtype: torch.dtype) -> None:
    check(decode_step([1, 33, 700], shape, page_tokens=64), dtype, choose=fixed(splits=splits))


@pytest.mark.parametrize("units", [1, 12, 60])
@pytest.mark.parametrize("shape", [SHAPES["mqa"], SHAPES["window"]], ids=["mqa", "window"])
def test_programs_walk_over_rows_of_all_lengths(shape: AttentionShape, units: int) -> None:
    """More rows than a program looks at together."""
    check(decode_step([1, 300, *[5, 33] * 16, 129], shape, 16), torch.float16, choose=fixed(units))


@pytest.mark.parametrize(
    ("lengths", "units", "stretches"),
    [
        ([256] * 5, 5, [8] * 5),
        ([256] * 9 + [0], 10, [8] * 9 + [1]),
        ([256, 250, 200, 256], 4, [8] * 4),
        ([256] * 8, 3, [24, 24, 16]),
        ([256] * 2, 9, [2] * 8),
        ([256] * 5 + [0], 5, [9, 9, 9, 9, 5]),
        ([256] * 4, 3, [11, 11, 10]),
        ([256, 32, 32, 32], 4, [3, 3, 3, 2]),
    ],
    ids=["one each", "and one padded", "nearly one length", "several each", "parts", "no room", "waste", "uneven"],
)
def test_rows_of_about_one_length_are_not_cut(lengths: list[int], units: int, stretches: list[int]) -> None:
    """Tiles of each program that has any; tiles are of 32 tokens."""
    step = decode_step(lengths, heads(2, 1, 64), 64)
    attention = attention_of(step, choose=fixed(units))
    attention.begin_step(step.cache_as(torch.float16).to(DEVICE), *rows_of(step))
    walks = [Walk(*walk) for walk in attention._begun.step.walks.tolist()]
    ((stretch, least),) = {(walk.stretch, walk.least) for walk in walks}
    line = sum(max(-(-length // 32), least) if length else 1 for length in lengths)
    assert [min(stretch, line - start) for start in range(0, line, stretch)] == stretches
    assert max(walk.before for walk in walks) <= line <= units * stretch
    if 0 not in lengths:
        check(step, torch.float16, choose=fixed(units))


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


@pytest.mark.parametrize(("rows", "units"), [(2, 32), (24, 33), (32, 32), (33, 33), (44, 33), (256, 33)])
def test_as_many_programs_as_run_at_a_time(rows: int, units: int) -> None:
    plan = make_plan(rows, 8, 128, 8192, torch.bfloat16, 132)
    assert (plan.units, plan.splits) == (units, 1)


def test_narrow_heads_have_more_programs() -> None:
    assert make_plan(12, 8, 64, 8192, torch.bfloat16, 132).units == 33
    assert make_plan(44, 8, 64, 8192, torch.bfloat16, 132).units == 66


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
    """It may be cut in more stretches than there is scratch for."""
    step = decode_step([1, 2], SHAPES["gqa"], page_tokens=16)
    with pytest.raises(ValueError, match=r"a cache of torch.float32, but scratch for torch.float16"):
        run(attention_of(step, torch.float16), step, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "window", "partials"),
    [(torch.bfloat16, None, 256 + 33), (torch.float32, None, 256 * 8), (torch.float32, 1024, 256 * 2)],
)
def test_scratch_is_what_the_steps_of_this_dtype_need(
    dtype: torch.dtype, window: int | None, partials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Llama-3-8B on a GPU of 132 multiprocessors: 4.7 MB of bfloat16, 33.6 MB of float32."""
    monkeypatch.setattr(triton_attention, "INTERPRETER_SMS", 132)
    attention = DecodeAttention(heads(32, 8, 128, window), 256, torch.device("cpu"), dtype, pdl=False)
    assert attention._partials.shape == (partials * 32, 128)
    assert attention._partial_lse.shape == (partials * 32,)


def test_steps_of_two_threads_do_not_mix() -> None:
    """As trials of steps do not that are compiled side by side."""
    attention = attention_of(decode_step([5], SHAPES["gqa"], 16), max_rows=3)
    few, many = decode_step([70], SHAPES["gqa"], 16), decode_step([5, 90, 33], SHAPES["gqa"], 16)
    attention.begin_step(many.cache_as(torch.float16).to(DEVICE), *rows_of(many))
    with ThreadPoolExecutor(1) as other:
        ours = other.submit(run, attention, few, torch.float16).result()
    assert_as_good(ours, torch_of(few, torch.float16), torch_of(few, torch.float64))
    cache = many.cache_as(torch.float16).to(DEVICE)
    ours = attention(many.q.to(DEVICE, torch.float16), cache, LAYER, *rows_of(many)).cpu()
    assert_as_good(ours, torch_of(many, torch.float16), torch_of(many, torch.float64))


def test_steps_with_wider_and_wider_tables() -> None:
    """They have more programs, and each has its record."""
    attention = attention_of(decode_step([5], heads(2, 1, 64), 16))
    units = []
    for longest in (20, 200, 700):
        step = decode_step([longest, 33], heads(2, 1, 64), 16)
        assert_as_good(
            run(attention, step, torch.float16), torch_of(step, torch.float16), torch_of(step, torch.float64)
        )
        begun = attention._begun.step
        assert len(begun.walks) == begun.plan.units
        units.append(begun.plan.units)
    assert units == sorted(set(units)), "or this shows nothing"


def test_a_part_of_a_row_may_be_empty() -> None:
    """Places of one length: the last part of a shorter row has nothing to do, and is merged all the same."""
    check(decode_step([316, 300], heads(2, 1, 64), 64), torch.float16, choose=fixed(units=10))


def test_a_step_begins_before_its_layers() -> None:
    step = decode_step([1, 2], SHAPES["gqa"], page_tokens=16)
    attention, cache = attention_of(step), step.cache_as(torch.float16).to(DEVICE)
    table, contexts = rows_of(step)
    attention.begin_step(cache, table[:1], contexts[:1])
    with pytest.raises(ValueError, match="2 rows of a step that began with others"):
        attention(step.q.to(DEVICE, torch.float16), cache, LAYER, table, contexts)
