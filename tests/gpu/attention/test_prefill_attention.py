"""Prefill attention on a GPU against float64: flash-attn-4 where it is installed, and PyTorch's SDPA.

After each row's context its last page holds NaN, as all memory that was never written: an earlier owner of a page may
have left any value there.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.attention.prefill_attention import (
    AttentionKind,
    FlashPrefill,
    PrefillAttention,
    SdpaPrefill,
    choose_prefill_attention,
)
from tests.kernels.prefill_cases import LENGTHS, LONG, ROWS, SHAPES, check, run, torch_of
from tests.kernels.steps import assert_as_good, heads, make_step
from tests.pairwise import pairwise

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GPU = torch.device("cuda")
PAGES = [16, 64, 128]
"""Page sizes: flash-attn-4 loads pages of 128 tokens with the copy engine, others through its threads."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
KERNEL: dict[str, Any] = {"attention": ["flash", "sdpa"], "page_tokens": PAGES, "dtype": DTYPES}
DEFAULT_PATH = [("flash", "128", "bfloat16", name) for name in ROWS]
"""The default kernels of most GPUs, which run every case of rows."""


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


@pytest.fixture(params=DTYPES.values(), ids=DTYPES.keys())
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pairwise(**KERNEL, rows=ROWS, always=DEFAULT_PATH, indirect=["attention"])
def test_as_exact_as_torch(
    attention: PrefillAttention, rows: list[tuple[int, int]], page_tokens: int, dtype: torch.dtype
) -> None:
    step = make_step(rows, SHAPES["gqa"], page_tokens)
    check(attention, step, dtype, GPU)


@pairwise(**KERNEL, shape=SHAPES | {"llama3": heads(32, 8, 128), "odd": heads(3, 3, 96)}, indirect=["attention"])
def test_every_shape_and_page_size(
    attention: PrefillAttention, shape: AttentionShape, page_tokens: int, dtype: torch.dtype
) -> None:
    step = make_step([(length, length + cached) for cached, length in enumerate(LENGTHS)], shape, page_tokens)
    check(attention, step, dtype, GPU)


@pairwise(
    **KERNEL,
    rows={"prompt": [(LONG, LONG)], "chunk": [(130, LONG)], "three": [(LONG, LONG), (129, LONG), (1, LONG)]},
    indirect=["attention"],
)
def test_long_rows(
    attention: PrefillAttention, rows: list[tuple[int, int]], page_tokens: int, dtype: torch.dtype
) -> None:
    step = make_step(rows, heads(4, 1, 128), page_tokens)
    check(attention, step, dtype, GPU)


@pairwise(**KERNEL, indirect=["attention"])
def test_rows_before_the_first_belong_to_another_kernel(
    attention: PrefillAttention, page_tokens: int, dtype: torch.dtype
) -> None:
    step = make_step([(1, 40), (1, 7), (129, 129), (20, 150)], SHAPES["gqa"], page_tokens)
    whole, exact = torch_of(step, dtype, GPU), torch_of(step, torch.float64, GPU)
    ours = run(attention, step, dtype, GPU, first_row=2)
    assert_as_good(ours, whole[2:], exact[2:])


@pairwise(**KERNEL, indirect=["attention"])
def test_queries_inside_a_stacked_product(attention: PrefillAttention, page_tokens: int, dtype: torch.dtype) -> None:
    """The engine passes q as a part of each token's row."""
    step = make_step([(129, 129), (20, 150)], SHAPES["gqa"], page_tokens)
    shape = step.shape

    class Strided:
        begin_step = attention.begin_step

        def __call__(self, q: torch.Tensor, *arguments: object) -> torch.Tensor:
            width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
            rows = torch.full((len(q), width), float("nan"), dtype=q.dtype, device=q.device)
            inside = rows[:, : shape.heads * shape.head_dim].view(q.shape)
            inside.copy_(q)
            return attention(inside, *arguments)  # type: ignore[arg-type]

    assert torch.equal(run(Strided(), step, dtype, GPU), run(attention, step, dtype, GPU))


@pytest.mark.parametrize("odd_page_tokens", [7, 16, 100, 128, 256])
def test_what_another_kernel_left_on_the_chip_is_not_read(odd_page_tokens: int, dtype: torch.dtype) -> None:
    """Tiles reach beyond a row's context, where shared memory holds old contents."""
    pytest.importorskip("flash_attn.cute", reason="needs the package flash-attn-4")
    attention = FlashPrefill(odd_page_tokens, pdl=True)
    step = make_step([(129, 129), (20, 150), (1, 7), (70, 333)], heads(8, 2, 128), odd_page_tokens)
    whole, exact = torch_of(step, dtype, GPU), torch_of(step, torch.float64, GPU)
    left = torch.full((4096, 4096), float("nan"), dtype=dtype, device=GPU)
    for _ in range(3):
        torch.mm(left, left)  # fills the shared memory of every multiprocessor with NaN
        assert_as_good(run(attention, step, dtype, GPU), whole, exact)


@pairwise(shape=["gqa", "mha", "window"], page_tokens=PAGES, dtype=DTYPES)
def test_no_prompt_waits_for_a_compiler(shape: str, page_tokens: int, dtype: torch.dtype) -> None:
    interface = pytest.importorskip("flash_attn.cute.interface", reason="needs the package flash-attn-4")
    attention = FlashPrefill(page_tokens, pdl=True)
    attention.compile([AttentionKind(SHAPES[shape])], dtype, GPU)
    compiled = set(interface._flash_attn_fwd.compile_cache.cache)
    for rows in ROWS.values():
        step = make_step(rows, SHAPES[shape], page_tokens)
        run(attention, step, dtype, GPU)
    run(attention, make_step([(200, 9000)], SHAPES[shape], page_tokens), dtype, GPU)
    assert set(interface._flash_attn_fwd.compile_cache.cache) == compiled


def test_the_choice_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tandem.engine.kernels.attention.prefill_attention"):
        choose_prefill_attention(GPU, torch.float32, [AttentionKind(SHAPES["gqa"])], 128, pdl=False)
    assert "SDPA" in caplog.text
    assert "bfloat16 and float16 only" in caplog.text
