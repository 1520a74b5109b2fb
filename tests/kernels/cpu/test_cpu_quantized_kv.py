"""Attention over 8-bit keys and values, and their store, against the reference over the same codes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.cpu.kernels import CpuKernels
from tandem.engine.kernels.kv_cache import QuantizedKv, dequantize_kv, quantize_kv
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.protocol.errors import Internal
from tests.kernels.quantized_kv.quantized_caches import quantized
from tests.kernels.steps import LAYER, Step, assert_as_good, heads, make_step, row_alone, with_sinks
from tests.pairwise import pairwise

REFERENCE = ReferenceKernels()
SHAPES = {
    "gqa": heads(9, 3, 64),
    "mqa": heads(20, 1, 64),
    "wide": heads(2, 2, 256),
    "odd": heads(4, 2, 80),
    "tail": heads(4, 2, 24),
    "window": heads(6, 2, 64, window=100),
    "capped": replace(heads(6, 2, 64), softcap=1.5),
}
STEPS = {
    "decode": [(1, 1), (1, 15), (1, 16), (1, 17), (1, 127), (1, 1025)],
    "prompts": [(1, 1), (15, 15), (17, 17), (129, 129)],
    "chunks": [(17, 127), (1, 1025), (7, 513), (2, 3)],
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def attend(kernels: Kernels, step: Step, cache: QuantizedKv, dtype: torch.dtype) -> Tensor:
    return kernels.attention(step.q.to(dtype), step.layer, cache, step.layout)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_codes_times_scales_are_the_values(dtype: torch.dtype) -> None:
    values = torch.randn(5, 3, 64) * torch.tensor([0.0, 1e-6, 1.0, 40.0, 3e4])[:, None, None]
    codes, scales = quantize_kv(values, dtype)
    assert (codes.dtype, scales.dtype, scales.shape) == (dtype, torch.float32, (5, 3))
    error = (dequantize_kv(codes, scales, torch.float32) - values).abs().amax(-1)
    # Half a code of int8; half of the last of three bits of the mantissa of float8.
    relative = 0.5 / 127 if dtype == torch.int8 else 1 / 16
    assert (error <= values.abs().amax(-1) * relative * 1.001).all()
    assert not codes[0].to(torch.float32).any()


@pairwise(rows=STEPS, shape=SHAPES, page_tokens=[16, 128], dtype=DTYPES)
def test_attention_is_as_exact_as_torch(
    rows: list[tuple[int, int]], shape: AttentionShape, page_tokens: int, kernels: CpuKernels, dtype: torch.dtype
) -> None:
    step = make_step(rows, shape, page_tokens)
    step = with_sinks(step) if shape is SHAPES["mqa"] else step
    cache = quantized(step.cache)
    ours, torchs = attend(kernels, step, cache, dtype), attend(REFERENCE, step, cache, dtype)
    assert_as_good(ours, torchs, attend(REFERENCE, step, cache, torch.float64))


def test_a_row_is_the_same_alone_and_in_any_step(kernels: CpuKernels, dtype: torch.dtype) -> None:
    rows = [(1, 300), (1, 1025), (40, 90), (1, 17)]
    step = make_step(rows, SHAPES["gqa"])
    cache = quantized(step.cache)
    together = attend(kernels, step, cache, dtype)
    for number in range(len(rows)):
        mine, alone = row_alone(step.layout, number)
        out = kernels.attention(step.q[mine].to(dtype), step.layer, cache, alone)
        assert torch.equal(out, together[mine])


@pairwise(
    shape=SHAPES | {"partial": replace(heads(4, 2, 80), rotary_dims=20)},
    normed={"plain": False, "qk_norm": True},
    page_tokens=[16, 7],
    dtype=DTYPES,
)
def test_rope_and_store(
    shape: AttentionShape, normed: bool, page_tokens: int, kernels: CpuKernels, dtype: torch.dtype
) -> None:
    step = make_step([(1, 1), (17, 33), (1, 500), (60, 60)], shape, page_tokens, filled=False)
    norm = torch.linspace(0.5, 1.5, shape.head_dim).bfloat16().to(dtype) if normed else None

    def store(kernels: Kernels) -> tuple[Tensor, QuantizedKv]:
        cache = quantized(step.cache)
        qkv = step.qkv.to(dtype, copy=True)
        return kernels.rope_and_store(qkv, replace(step.layer, q_norm=norm, k_norm=norm), cache, step.layout), cache

    (our_q, ours), (torch_q, torchs) = store(kernels), store(REFERENCE)
    torch.testing.assert_close(our_q, torch_q, rtol=0.02, atol=0.02)
    written = torch.zeros(ours.scales.shape, dtype=torch.bool)
    written[step.layout.slots // page_tokens, LAYER, :, :, step.layout.slots % page_tokens] = True
    before = quantized(step.cache)
    assert torch.equal(ours.codes[~written], before.codes[~written]), "memory outside of the step's slots was written"
    assert torch.equal(ours.scales[~written].nan_to_num(-1), before.scales[~written].nan_to_num(-1))
    assert torch.equal(ours.codes[:, :, 1], torchs.codes[:, :, 1]), "values are quantized as they are"
    assert torch.equal(ours.scales[:, :, 1].nan_to_num(-1), torchs.scales[:, :, 1].nan_to_num(-1))
    values, expected = (
        dequantize_kv(cache.codes, cache.scales, torch.float32)[:, LAYER, 0][written[:, LAYER, 0]]
        for cache in (ours, torchs)
    )
    # Two codes apart at most: a rotated key that is rounded otherwise may be at the edge between two of them.
    most = expected.abs().amax(-1, keepdim=True)
    assert ((values - expected).abs() <= most * (2 / 127 + (0.02 if dtype == torch.bfloat16 else 0))).all()


def test_float8_is_refused(kernels: CpuKernels, dtype: torch.dtype) -> None:
    step = make_step([(1, 17)], SHAPES["gqa"])
    with pytest.raises(Internal, match="int8 keys and values"):
        attend(kernels, step, quantized(step.cache, torch.float8_e4m3fn), dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_keys_and_values_that_are_not_finite_stay_so(value: float, kernels: CpuKernels, dtype: torch.dtype) -> None:
    step = make_step([(3, 3)], SHAPES["gqa"], filled=False)
    cache, qkv = quantized(step.cache), step.qkv.to(dtype, copy=True)
    qkv[1, -1] = value
    kernels.rope_and_store(qkv, step.layer, cache, step.layout)
    slot = int(step.layout.slots[1])
    scales = cache.scales[slot // 16, LAYER, 1, :, slot % 16]
    assert scales.isnan().tolist() == [False, False, True]
