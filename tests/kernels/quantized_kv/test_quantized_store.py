"""Triton's store of keys and values as codes: bit for bit those of what it stores unquantized."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.kv_cache import KvCache, QuantizedKv, quantize_kv
from tandem.engine.kernels.rowwise.triton_rope import SMALL_TOKENS, TINY_TOKENS, plan_tile, rope_and_store
from tandem.engine.kernels.triton_launch import overlaps_launches
from tests.kernels.quantized_kv.quantized_caches import moved, quantized
from tests.kernels.steps import LAYER, Step, head_major, heads, make_step
from tests.pairwise import pairwise

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# The interpreter truncates to bfloat16 where a GPU rounds.
DTYPES = {"float32": torch.float32, "float16": torch.float16} | ({"bfloat16": torch.bfloat16} if ON_GPU else {})
ROWS = [(1, 1), (17, 33), (1, 500), (60, 60) if ON_GPU else (20, 20)]
SHAPES = {
    "gqa": heads(9, 3, 64),
    "wide": heads(2, 2, 256),
    "odd": heads(4, 2, 80),
    "partial": replace(heads(4, 2, 80), rotary_dims=20),
}


def store(
    step: Step, cache: KvCache, dtype: torch.dtype, normed: bool = False, tile_tokens: int | None = None
) -> Tensor:
    """Stores the step's keys and values → its queries."""
    shape, layout = step.shape, step.layout
    norm = torch.linspace(0.5, 1.5, shape.head_dim).to(DEVICE, dtype) if normed else None
    tile = None if tile_tokens is None else plan_tile(tile_tokens, shape, dtype.itemsize)
    return rope_and_store(
        step.qkv.to(DEVICE, dtype),
        replace(step.layer, rope=step.rope.to(DEVICE), q_norm=norm, k_norm=norm),
        cache,
        replace(layout, positions=layout.positions.to(DEVICE), slots=layout.slots.to(DEVICE)),
        pdl=overlaps_launches(),
        tile=tile,
    )


def expected(step: Step, kind: torch.dtype, plain: Tensor) -> QuantizedKv:
    """Returns the cache before with the codes of what `plain` has in the step's slots."""
    stored, page_tokens = quantized(step.cache, kind), step.cache.shape[4]
    slots = step.layout.slots[step.layout.slots >= 0]
    at = (slots // page_tokens, LAYER, slice(None), slice(None), slots % page_tokens)
    codes, scales = quantize_kv(plain.cpu()[at], kind)
    stored.codes[at], stored.scales[at] = codes, scales
    return stored


def assert_same(ours: QuantizedKv, wanted: QuantizedKv) -> None:
    assert torch.equal(ours.scales.cpu().nan_to_num(-1), wanted.scales.nan_to_num(-1))
    assert torch.equal(ours.codes.cpu().view(torch.int8), wanted.codes.view(torch.int8))


@pairwise(
    shape=SHAPES,
    normed={"plain": False, "qk_norm": True},
    dtype=DTYPES,
    kind=KINDS,
    tile_tokens={"tiny": TINY_TOKENS, "small": SMALL_TOKENS, "large": SMALL_TOKENS + 1},
)
def test_codes_are_those_of_the_stored_numbers(
    shape: AttentionShape, normed: bool, dtype: torch.dtype, kind: torch.dtype, tile_tokens: int
) -> None:
    step = make_step(ROWS, shape, 128 if tile_tokens == SMALL_TOKENS else 16, filled=False)
    plain = head_major(step.cache).to(DEVICE, dtype)
    plain_q = store(step, plain, dtype, normed, tile_tokens)
    ours = moved(quantized(step.cache, kind), DEVICE)
    q = store(step, ours, dtype, normed, tile_tokens)
    assert torch.equal(q, plain_q)
    assert_same(ours, expected(step, kind, plain))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_numbers_of_any_size_and_ties(kind: torch.dtype) -> None:
    step = make_step([(40, 40)], heads(2, 2, 64), 16, filled=False)
    sizes = torch.logspace(-7, 4, 40).double()[:, None]
    schedulers = torch.arange(64).double() - 31.5  # codes between two integers
    qkv = torch.where(torch.arange(40)[:, None] % 2 == 0, schedulers.repeat(6) * 4, step.qkv * sizes)
    qkv[3] = 0
    qkv[:, 4 * 64 + 3] = torch.where(torch.arange(40) % 2 == 0, 127.0 * 4, qkv[:, 4 * 64 + 3])
    step = replace(step, qkv=qkv.half().double())
    plain = head_major(step.cache).to(DEVICE, torch.float16)
    store(step, plain, torch.float16)
    ours = moved(quantized(step.cache, kind), DEVICE)
    store(step, ours, torch.float16)
    assert_same(ours, expected(step, kind, plain))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_numbers_that_are_not_finite_have_no_scale(value: float, kind: torch.dtype) -> None:
    step = make_step([(3, 3)], heads(9, 3, 64), 16, filled=False)
    step.qkv[1, -1] = value
    cache = moved(quantized(step.cache, kind), DEVICE)
    store(step, cache, torch.float16)
    slots = step.layout.slots
    scales = cache.scales.cpu()[slots // 16, LAYER, 1, :, slots % 16]
    assert scales.isnan().tolist() == [[False] * 3, [False, False, True], [False] * 3]


def test_padded_tokens_are_stored_nowhere() -> None:
    step = make_step([(3, 3), (1, 5)], heads(9, 3, 64), 16, filled=False)
    slots = step.layout.slots.clone()
    slots[1] = -1
    step = replace(step, layout=replace(step.layout, slots=slots))
    plain = head_major(step.cache).to(DEVICE, torch.float16)
    store(step, plain, torch.float16)
    ours = moved(quantized(step.cache), DEVICE)
    store(step, ours, torch.float16)
    assert_same(ours, expected(step, torch.int8, plain))
