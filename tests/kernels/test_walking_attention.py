"""Decode attention by programs that walk over the ends of rows, against float64, as `test_triton_attention` does."""

from typing import Any

import pytest
import torch

from benchmarks.attention_candidates import WalkingAttention
from engine.kernels.base import AttentionShape
from engine.kernels.triton_attention import Plan
from engine.kernels.triton_launch import overlaps_launches

from .steps import assert_as_good
from .test_triton_attention import DEVICE, SHAPES, decode_step, run, torch_of

UNEVEN = [1, 300, *[5, 33] * 16, 129]
"""More rows than a program looks at together."""


def check(lengths: list[int], shape: AttentionShape, slots: int, page_tokens: int = 16, **options: Any) -> None:
    step = decode_step(lengths, shape, page_tokens)
    choose: Any = lambda *_: Plan(32, warps=4, stages=2, splits=1, least_tiles=1, slots=slots)  # noqa: E731
    attention = WalkingAttention(shape, len(lengths), DEVICE, pdl=overlaps_launches(), choose=choose, **options)
    ours = run(attention, step, torch.float16)
    assert_as_good(ours, torch_of(step, torch.float16), torch_of(step, torch.float64))


@pytest.mark.parametrize("slots", [1, 12, 60])
@pytest.mark.parametrize("shape", [SHAPES["mqa"], SHAPES["window"]], ids=["mqa", "window"])
def test_rows_of_all_lengths(shape: AttentionShape, slots: int) -> None:
    check(UNEVEN, shape, slots)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape(shape: AttentionShape) -> None:
    check([127, 1, 300], shape, 4)


@pytest.mark.parametrize("page_tokens", [48, 128])
def test_every_page_size(page_tokens: int) -> None:
    check([127, 1, 300], SHAPES["gqa"], 4, page_tokens)


def test_rows_of_one_length_have_programs_of_their_own() -> None:
    shape, lengths = SHAPES["gqa"], [256] * 5
    step = decode_step(lengths, shape, 64)
    choose: Any = lambda *_: Plan(32, warps=4, stages=2, splits=1, least_tiles=1, slots=5)  # noqa: E731
    attention = WalkingAttention(shape, 5, DEVICE, pdl=overlaps_launches(), choose=choose)
    attention._partials.fill_(float("nan"))
    attention._partial_lse.fill_(float("nan"))
    assert_as_good(run(attention, step, torch.float16), torch_of(step, torch.float16), torch_of(step, torch.float64))
    assert attention._partials.isnan().all(), "nothing was there to merge"


def test_layout_read_early() -> None:
    check([1, 300, 33], SHAPES["gqa"], 12, early=True)


def test_padded_rows_read_nothing_and_give_zeros() -> None:
    shape = SHAPES["gqa"]
    step = decode_step([129, 17], shape, 16)
    table = torch.cat((step.layout.page_table, torch.full((3, step.layout.page_table.shape[1]), 1 << 30).int()))
    contexts = torch.cat((step.layout.context_lens, torch.zeros(3).int())).to(DEVICE)
    q = torch.cat((step.q, torch.randn(3, *step.q.shape[1:], dtype=torch.float64))).to(DEVICE, torch.float16)
    for slots in (1, 2, 7):
        choose: Any = lambda *_, slots=slots: Plan(32, 4, 2, splits=1, least_tiles=1, slots=slots)  # noqa: E731
        attention = WalkingAttention(shape, 5, DEVICE, pdl=overlaps_launches(), choose=choose)
        out = attention(q, step.cache_as(torch.float16).to(DEVICE), 1, table.to(DEVICE), contexts).cpu()
        assert_as_good(out[:2], torch_of(step, torch.float16), torch_of(step, torch.float64))
        assert not out[2:].any()
        assert not attention._counters.any()


def test_a_plan_without_shared_programs_is_refused() -> None:
    attention = WalkingAttention(SHAPES["gqa"], 1, DEVICE, pdl=False)
    step = decode_step([700], SHAPES["gqa"], 16)
    with pytest.raises(ValueError, match="no number of programs"):
        run(attention, step, torch.float16)
