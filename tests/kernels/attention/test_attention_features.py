"""Soft caps, sinks and pages whose heads are outermost, in decode attention and in the fallback of prefill attention.

Against float64, on shuffled pages with NaN in all memory that was never written.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.attention.prefill_attention import SdpaPrefill
from tandem.engine.kernels.attention.triton_attention_plan import PlanFunction, make_plan
from tandem.engine.kernels.reference import ReferenceKernels
from tests.kernels import prefill_cases
from tests.kernels.decode_cases import ON_GPU, attention_of, check, decode_step, fixed, run, torch_of
from tests.kernels.steps import Step, assert_as_good, head_major, heads, make_step, with_sinks
from tests.pairwise import pairwise

CPU = torch.device("cpu")
SHAPES = {
    "capped": replace(heads(6, 2, 64), softcap=1.5),
    "capped window": replace(heads(4, 2, 64, window=100), softcap=1.5),
    "window": heads(4, 1, 64, window=100),
    "odd": replace(heads(2, 2, 80), softcap=50.0),
}
PLANS = {"chosen": make_plan, "one range": fixed(splits=1), "splits": fixed(splits=7), "units": fixed(units=7)}
DTYPES = {"float32": torch.float32, "float16": torch.float16} | ({"bfloat16": torch.bfloat16} if ON_GPU else {})
PREFILL_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def made(step: Step, sinks: bool) -> Step:
    return with_sinks(step) if sinks else step


@pairwise(
    shape=SHAPES, sinks={"sinks": True, "none": False}, choose=PLANS, page_tokens=[16, 48, 64], dtype=DTYPES,
    always=[("capped window", "sinks", "units", "16", "float16"), ("window", "sinks", "splits", "64", "float32")],
)  # fmt: skip
def test_decode(shape: AttentionShape, sinks: bool, choose: PlanFunction, page_tokens: int, dtype: torch.dtype) -> None:
    check(made(decode_step([1, 33, 300], shape, page_tokens), sinks), dtype, choose=choose)


@pytest.mark.parametrize("choose", [fixed(splits=4), fixed(units=5)], ids=["splits", "units"])
def test_a_large_sink_leaves_little_of_any_value(choose: PlanFunction) -> None:
    """A sink that counted in each of a row's ranges would leave less."""
    step = with_sinks(decode_step([300], heads(2, 1, 64), 64))
    assert step.sinks is not None
    step = replace(step, sinks=step.sinks + 12)
    ours = run(attention_of(step, torch.float32, choose=choose), step, torch.float32)
    torch.testing.assert_close(ours.double(), torch_of(step, torch.float64), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("choose", [fixed(splits=2), fixed(units=3)], ids=["splits", "units"])
@pytest.mark.parametrize("page_tokens", [48, 64])
def test_decode_over_pages_whose_heads_are_outermost(page_tokens: int, choose: PlanFunction) -> None:
    step = decode_step([1, 33, 100], heads(6, 2, 64), page_tokens)
    for cache in (step.cache, head_major(step.cache)):
        ours = run(attention_of(step, choose=choose), step, torch.float16, cache.half())
        assert_as_good(ours, torch_of(step, torch.float16), torch_of(step, torch.float64))


@pairwise(shape=SHAPES, sinks={"sinks": True, "none": False}, dtype=PREFILL_DTYPES)
def test_prefill_without_a_library(shape: AttentionShape, sinks: bool, dtype: torch.dtype) -> None:
    step = made(make_step([(5, 5), (9, 200), (130, 300)], shape), sinks)
    prefill_cases.check(SdpaPrefill(), step, dtype, CPU, cache=head_major(step.cache))


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_pages_before_the_window_may_hold_anything(softcap: float | None) -> None:
    """Another request may own them: the fallback and the reference read neither their numbers nor their ids."""
    shape = replace(heads(4, 2, 64, window=40), softcap=softcap)
    step = make_step([(9, 200), (1, 300), (20, 30)], shape)
    exact = prefill_cases.torch_of(step, torch.float64, CPU)
    table = step.layout.page_table
    for row, (tokens, context) in enumerate(step.rows):
        table[row, : max(context - tokens - shape.window + 1, 0) // 16] = 1 << 30
    assert torch.equal(prefill_cases.torch_of(step, torch.float64, CPU), exact)
    ours = prefill_cases.run(SdpaPrefill(), step, torch.float32, CPU)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_the_reference_reads_pages_of_any_order() -> None:
    step = with_sinks(make_step([(9, 50), (1, 20)], SHAPES["capped window"]))

    def reference(cache: Tensor) -> Tensor:
        return ReferenceKernels().attention(step.q, step.layer, cache, step.layout)

    assert torch.equal(reference(head_major(step.cache)), reference(step.cache))
