"""Prefill attention by PyTorch's SDPA against float64, on shuffled pages with NaN in all memory that was never written.

tests/gpu tests flash-attn-4 on the same steps.
"""

import inspect
import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.attention import prefill_attention
from tandem.engine.kernels.attention.prefill_attention import (
    AttentionKind,
    FlashPrefill,
    SdpaPrefill,
    choose_prefill_attention,
    leaves_idle,
)
from tests.kernels.prefill_cases import LENGTHS, LONG, ROWS, SHAPES, check, run, torch_of
from tests.kernels.steps import assert_as_good, heads, make_step
from tests.soak import soak

CPU = torch.device("cpu")
NO_PAGE = 1 << 30
"""A page id that no cache has."""
HALVES = (torch.bfloat16, torch.float16)
"""The dtypes that a CPU computes slowly."""


@pytest.fixture(params=[torch.float32, *HALVES], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_as_exact_as_torch(rows: list[tuple[int, int]], dtype: torch.dtype) -> None:
    check(SdpaPrefill(), make_step(rows, SHAPES["gqa"], page_tokens=16), dtype, CPU)


@pytest.mark.parametrize("page_tokens", [1, 48, 128])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape_and_page_size(shape: AttentionShape, page_tokens: int, dtype: torch.dtype) -> None:
    rows = [(length, length + cached) for cached, length in enumerate(LENGTHS)]
    check(SdpaPrefill(), make_step(rows, shape, page_tokens, seed=page_tokens), dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, *(pytest.param(dtype, marks=soak) for dtype in HALVES)], ids=str)
def test_a_long_prompt(dtype: torch.dtype) -> None:
    check(SdpaPrefill(), make_step([(LONG, LONG)], heads(1, 1, 64), page_tokens=128), dtype, CPU)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_chunk_of_a_long_prompt(dtype: torch.dtype) -> None:
    """float32 is left out: PyTorch's fused attention sums thousands of keys less exactly than its plain one."""
    check(SdpaPrefill(), make_step([(130, LONG)], heads(1, 1, 64), page_tokens=128), dtype, CPU)


@pytest.mark.parametrize("scores", [1, 1000, 50_000])
def test_rows_in_parts(scores: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_attention, "_SDPA_SCORES", scores)
    check(SdpaPrefill(), make_step([(129, 129), (30, 200)], SHAPES["window"]), dtype, CPU)


def test_rows_before_the_first_belong_to_another_kernel(dtype: torch.dtype) -> None:
    rows = [(1, 40), (1, 7), (129, 129), (20, 150)]
    step = make_step(rows, SHAPES["gqa"])
    whole, exact = torch_of(step, dtype, CPU), torch_of(step, torch.float64, CPU)
    assert_as_good(run(SdpaPrefill(), step, dtype, CPU, first_row=2), whole[2:], exact[2:])


def test_only_pages_of_the_context_are_read(dtype: torch.dtype) -> None:
    step = make_step([(129, 129), (20, 150), (1, 16)], SHAPES["gqa"])
    wanted = run(SdpaPrefill(), step, dtype, CPU)
    for row, (_, context) in enumerate(step.rows):
        step.layout.page_table[row, -(-context // 16) :] = NO_PAGE
    assert torch.equal(run(SdpaPrefill(), step, dtype, CPU), wanted)


def test_a_float32_row_is_the_same_alone_and_in_company() -> None:
    rows = [(129, 129), (20, 150), (60, 60)]
    step = make_step(rows, SHAPES["gqa"])
    together = run(SdpaPrefill(), step, torch.float32, CPU)
    for row, start in enumerate(step.layout.row_starts.tolist()[:-1]):
        tail = run(SdpaPrefill(), step, torch.float32, CPU, first_row=row)
        assert torch.equal(tail, together[start:])


@pytest.mark.parametrize("page_tokens", [16, 64, 128, 256])
def test_a_slow_page_size_is_warned_of_with_a_better_one(
    page_tokens: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flash = Mock()
    monkeypatch.setattr(prefill_attention, "_why_no_flash", lambda *_: "")
    monkeypatch.setattr(prefill_attention, "FlashPrefill", flash)
    with caplog.at_level(logging.INFO, prefill_attention.__name__):
        assert (
            choose_prefill_attention(CPU, torch.bfloat16, [AttentionKind(SHAPES["gqa"])], page_tokens, pdl=True)
            is flash.return_value
        )
    flash.assert_called_once_with(page_tokens, True)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    slow = [f"pages of {page_tokens} tokens slow prefill attention down; 128 is the fast size"]
    assert warnings == (slow if page_tokens != 128 else [])
    assert caplog.messages[-1] == "prefill attention: flash-attn-4"


@pytest.mark.parametrize(
    ("arguments", "lacking"),
    [
        (["softcap", "learnable_sink"], None),
        (["softcap"], "learnable_sink"),
        (["learnable_sink"], "softcap"),
    ],
)
def test_a_library_without_an_argument_is_not_used_where_layers_need_it(
    arguments: list[str], lacking: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in arguments]
    function = Mock(__signature__=inspect.Signature(parameters))
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_varlen_func=function))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    capped = AttentionKind(replace(SHAPES["gqa"], softcap=50.0))

    def chosen(*kinds: AttentionKind) -> object:
        return choose_prefill_attention(torch.device("cuda"), torch.bfloat16, kinds, 128, pdl=True)

    assert isinstance(chosen(AttentionKind(SHAPES["gqa"])), FlashPrefill)
    implementation = chosen(capped, AttentionKind(SHAPES["mqa"], sinks=True))
    assert isinstance(implementation, FlashPrefill if lacking is None else SdpaPrefill)
    assert lacking is None or f"the installed flash-attn-4 has no argument {lacking}" in caplog.text


def test_windows_over_small_pages_take_the_fallback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    kinds = [AttentionKind(SHAPES["gqa"]), AttentionKind(SHAPES["window"])]
    chosen = choose_prefill_attention(torch.device("cuda"), torch.bfloat16, kinds, 64, pdl=True)
    assert isinstance(chosen, SdpaPrefill)
    assert "windows over pages of 128 tokens only" in caplog.text


def test_prefill_attention_without_the_library_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, prefill_attention.__name__):
        assert isinstance(
            choose_prefill_attention(CPU, torch.bfloat16, [AttentionKind(SHAPES["gqa"])], 16, pdl=True), SdpaPrefill
        )
    (said,) = caplog.messages
    assert said.endswith("(flash-attn-4 needs a GPU of compute capability 9.0)")


@pytest.mark.parametrize(("tokens", "idle"), [(1, True), (128, True), (384, True), (385, False), (2048, False)])
def test_short_chunks_leave_multiprocessors_idle(tokens: int, idle: bool) -> None:
    assert leaves_idle(tokens, heads=32, multiprocessors=132) is idle


def test_without_multiprocessors_none_is_idle() -> None:
    assert not leaves_idle(1, heads=32, multiprocessors=0)
