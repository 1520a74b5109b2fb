"""Prefill attention on a GPU against float64: flash-attn-4 where it is installed, and PyTorch's SDPA.

Behind each row's context in its last page is NaN, as everywhere where nothing was written: an earlier owner of a page
may have left anything there.
"""

from __future__ import annotations

import logging

import pytest
import torch

from costs.step_grid import WINDOW_TOKENS
from engine.kernels.base import AttentionShape
from engine.kernels.prefill_attention import (
    FlashPrefill,
    PrefillAttention,
    SdpaPrefill,
    choose_prefill_attention,
    flash_kinds,
)
from tests.kernels.prefill_cases import LENGTHS, LONG, ROWS, SHAPES, check, run, torch_of
from tests.kernels.split_cases import as_graph
from tests.kernels.steps import Step, assert_as_good, heads, make_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GPU = torch.device("cuda")
PAGES = [16, 64, 128]
"""Flash-attn-4 loads pages of 128 tokens with the copy engine, others through its threads."""


@pytest.fixture(params=PAGES)
def page_tokens(request: pytest.FixtureRequest) -> int:
    chosen: int = request.param
    return chosen


@pytest.fixture(params=["flash", "sdpa"])
def attention(request: pytest.FixtureRequest, page_tokens: int) -> PrefillAttention:
    if request.param == "sdpa":
        return SdpaPrefill()
    pytest.importorskip("flash_attn.cute", reason="needs the package flash-attn-4")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("flash-attn-4 needs a GPU of compute capability 9.0")
    return FlashPrefill(page_tokens, pdl=True)


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_as_exact_as_torch(
    attention: PrefillAttention, rows: list[tuple[int, int]], page_tokens: int, dtype: torch.dtype
) -> None:
    step = make_step(rows, SHAPES["gqa"], page_tokens)
    check(attention, step, dtype, GPU)


@pytest.mark.parametrize("shape", [*SHAPES.values(), heads(32, 8, 128), heads(3, 3, 96)], ids=str)
def test_every_shape_and_page_size(
    attention: PrefillAttention, shape: AttentionShape, page_tokens: int, dtype: torch.dtype
) -> None:
    step = make_step([(length, length + cached) for cached, length in enumerate(LENGTHS)], shape, page_tokens)
    check(attention, step, dtype, GPU)


@pytest.mark.parametrize(
    "rows",
    [[(LONG, LONG)], [(130, LONG)], [(LONG, LONG), (129, LONG), (1, LONG)]],
    ids=["prompt", "chunk", "three"],
)
def test_long_rows(
    attention: PrefillAttention, rows: list[tuple[int, int]], page_tokens: int, dtype: torch.dtype
) -> None:
    step = make_step(rows, heads(4, 1, 128), page_tokens)
    check(attention, step, dtype, GPU)


def test_rows_before_the_first_belong_to_another_kernel(
    attention: PrefillAttention, page_tokens: int, dtype: torch.dtype
) -> None:
    step = make_step([(1, 40), (1, 7), (129, 129), (20, 150)], SHAPES["gqa"], page_tokens)
    whole, exact = torch_of(step, dtype, GPU), torch_of(step, torch.float64, GPU)
    ours = run(attention, step, dtype, GPU, first_row=2)
    assert_as_good(ours, whole[2:], exact[2:])


def test_queries_inside_a_stacked_product(attention: PrefillAttention, page_tokens: int, dtype: torch.dtype) -> None:
    """As the engine passes them: q is a part of each token's row."""
    step = make_step([(129, 129), (20, 150)], SHAPES["gqa"], page_tokens)
    shape = step.shape

    class Strided:
        begin_step = attention.begin_step
        begin_layer = attention.begin_layer

        def __call__(self, q: torch.Tensor, *arguments: object) -> torch.Tensor:
            width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
            rows = torch.full((len(q), width), float("nan"), dtype=q.dtype, device=q.device)
            inside = rows[:, : shape.heads * shape.head_dim].view(q.shape)
            inside.copy_(q)
            return attention(inside, *arguments)  # type: ignore[arg-type]

    assert torch.equal(run(Strided(), step, dtype, GPU), run(attention, step, dtype, GPU))


@pytest.mark.parametrize("odd_page_tokens", [7, 16, 100, 128, 256])
def test_what_another_kernel_left_on_the_chip_is_not_read(odd_page_tokens: int, dtype: torch.dtype) -> None:
    """Tiles reach beyond a row's context; what lies there in shared memory is whatever was there before."""
    pytest.importorskip("flash_attn.cute", reason="needs the package flash-attn-4")
    attention = FlashPrefill(odd_page_tokens, pdl=True)
    step = make_step([(129, 129), (20, 150), (1, 7), (70, 333)], heads(8, 2, 128), odd_page_tokens)
    whole, exact = torch_of(step, dtype, GPU), torch_of(step, torch.float64, GPU)
    left = torch.full((4096, 4096), float("nan"), dtype=dtype, device=GPU)
    for _ in range(3):
        torch.mm(left, left)  # fills the shared memory of every multiprocessor with what is not a number
        assert_as_good(run(attention, step, dtype, GPU), whole, exact)


W = WINDOW_TOKENS
SPLIT = {
    **{f"1 token, context of {context}": [(1, context)] for context in (1, 127, W, W + 1, 2 * W + 1)},
    **{f"112 tokens, context of {context}": [(112, context)] for context in (112, W, 2 * W - 1, 2 * W, 2 * W + 1)},
    **{f"{tokens} tokens across a border": [(tokens, 3 * W + tokens // 2)] for tokens in (2, 48, 129, 256)},
    "many rows": [(3, 5000), (1, 1), (40, 40), (20, 2 * W), (1, 2 * W + 1), (2, W + 1), (129, 6000)],
}
"""Rows of (tokens, context with them)."""
FAR = {"1 token": [(1, 70_000)], "112 tokens": [(112, 70_000)], "240 tokens": [(240, 65_536 + 240)]}
split_pages = pytest.mark.parametrize("page_tokens", [16, 128], indirect=True)


@pytest.fixture
def flash(page_tokens: int) -> FlashPrefill:
    pytest.importorskip("flash_attn.cute", reason="needs the package flash-attn-4")
    return FlashPrefill(page_tokens, pdl=True)


def check_split(flash: FlashPrefill, step: Step, dtype: torch.dtype) -> None:
    """As graphs hold such steps, with room for more of everything."""
    ours = run(flash, as_graph(step, W, empty_rows=2, tokens=5, windows=2), dtype, GPU)
    tokens = int(step.layout.row_starts[-1])
    assert_as_good(ours[:tokens], torch_of(step, dtype, GPU), torch_of(step, torch.float64, GPU))
    assert not ours[tokens:].any(), "tokens of no row"


@split_pages
@pytest.mark.parametrize("rows", SPLIT.values(), ids=SPLIT.keys())
@pytest.mark.parametrize("shape", [heads(4, 1, 64), heads(4, 1, 128), heads(2, 2, 64), heads(3, 1, 96)], ids=str)
def test_split_over_the_context(
    flash: FlashPrefill, shape: AttentionShape, rows: list[tuple[int, int]], page_tokens: int, dtype: torch.dtype
) -> None:
    check_split(flash, make_step(rows, shape, page_tokens), dtype)


@split_pages
@pytest.mark.parametrize("rows", FAR.values(), ids=FAR.keys())
@pytest.mark.parametrize("shape", [heads(4, 1, 64), heads(4, 1, 128)], ids=str)
def test_split_over_a_long_context(
    flash: FlashPrefill, shape: AttentionShape, rows: list[tuple[int, int]], page_tokens: int
) -> None:
    check_split(flash, make_step(rows, shape, page_tokens), torch.bfloat16)


@split_pages
def test_split_beside_rows_of_another_kernel(flash: FlashPrefill, page_tokens: int, dtype: torch.dtype) -> None:
    step = make_step([(1, 9000), (1, 7), (100, 9000), (20, 150)], SHAPES["gqa"], page_tokens)
    whole, exact = torch_of(step, dtype, GPU), torch_of(step, torch.float64, GPU)
    ours = run(flash, as_graph(step, W, empty_rows=2), dtype, GPU, first_row=2)
    assert_as_good(ours, whole[2:], exact[2:])


@split_pages
def test_split_gives_the_same_bits_every_time(flash: FlashPrefill, page_tokens: int, dtype: torch.dtype) -> None:
    step = as_graph(make_step(SPLIT["many rows"], SHAPES["gqa"], page_tokens), W)
    other = as_graph(make_step([(100, 30_000)], SHAPES["gqa"], page_tokens, seed=1), W)
    first = run(flash, step, dtype, GPU)
    for _ in range(5):
        run(flash, other, dtype, GPU)
        assert torch.equal(run(flash, step, dtype, GPU), first)


@split_pages
def test_layers_with_a_window_of_their_own_are_not_split(
    flash: FlashPrefill, page_tokens: int, dtype: torch.dtype
) -> None:
    step = make_step([(112, 5000)], SHAPES["window"], page_tokens)
    assert torch.equal(run(flash, as_graph(step, W), dtype, GPU), run(flash, step, dtype, GPU))


@pytest.mark.parametrize("shape", ["gqa", "mha", "window"])
def test_no_prompt_waits_for_a_compiler(shape: str, page_tokens: int, dtype: torch.dtype) -> None:
    interface = pytest.importorskip("flash_attn.cute.interface", reason="needs the package flash-attn-4")
    attention = FlashPrefill(page_tokens, pdl=True)
    attention.compile([SHAPES[shape]], dtype, GPU, flash_kinds(split=True))
    compiled = set(interface._flash_attn_fwd.compile_cache.cache)
    for rows in ROWS.values():
        step = make_step(rows, SHAPES[shape], page_tokens)
        run(attention, step, dtype, GPU)
        run(attention, as_graph(step, WINDOW_TOKENS, empty_rows=1, tokens=3, windows=3), dtype, GPU)
    run(attention, as_graph(make_step([(200, 9000)], SHAPES[shape], page_tokens), WINDOW_TOKENS), dtype, GPU)
    assert set(interface._flash_attn_fwd.compile_cache.cache) == compiled


def test_the_choice_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "engine.kernels.prefill_attention"):
        choose_prefill_attention(GPU, torch.float32, 64, 128, pdl=False)
    assert "SDPA" in caplog.text
    assert "bfloat16 and float16 only" in caplog.text
