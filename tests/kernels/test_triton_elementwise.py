"""RMSNorm, activation, rotary embedding with the KV store, and embedding in Triton against float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.base import DeferredTokens
from tandem.engine.kernels.layers import AttentionLayer, Norm
from tandem.engine.kernels.linear.triton_activation import gelu_mul, silu_mul
from tandem.engine.kernels.reference import ReferenceKernels, activate
from tandem.engine.kernels.reference import rms_norm as reference_rms_norm
from tandem.engine.kernels.rowwise.triton_embed import embed
from tandem.engine.kernels.rowwise.triton_norm import norm_add, rms_norm
from tandem.engine.kernels.rowwise.triton_rope import SMALL_TOKENS, TINY_TOKENS, plan_tile, rope_and_store
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.engine.steps.sampling_metadata import NO_TOKEN
from tests.kernels.steps import LAYER, Step, assert_as_good, head_major, heads, make_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PDL = overlaps_launches()
EPS = 1e-5
GUARD = 512
"""Elements of NaN before and after an input: a load outside it shows."""

# The interpreter truncates to bfloat16 where a GPU rounds: float16 is tested for both there.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
big = pytest.mark.skipif(DEVICE.type == "cpu", reason="too slow in the interpreter")


def random(*sizes: int, seed: int = 0) -> Tensor:
    """Returns float64 values that every dtype holds exactly."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).bfloat16().double()


def guarded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a contiguous copy on the device, NaN on both of its sides."""
    room = torch.full((values.numel() + 2 * GUARD,), float("nan"), dtype=dtype, device=DEVICE)
    inner = room[GUARD : GUARD + values.numel()].view(values.shape)
    return inner.copy_(values)


@all_dtypes
@pytest.mark.parametrize(
    ("tokens", "width"), [(1, 576), (3, 100), (129, 64), (2, 4096), pytest.param(2049, 5120, marks=big)]
)
def test_rms_norm(tokens: int, width: int, dtype: torch.dtype) -> None:
    x, weight = random(tokens, width), random(width, seed=1)
    x[0] *= 300
    ours = rms_norm(guarded(x, dtype), Norm(guarded(weight, dtype), EPS), pdl=PDL)
    baseline = reference_rms_norm(x.to(DEVICE, dtype), weight.to(DEVICE, dtype), EPS)
    assert_as_good(ours.cpu(), baseline.cpu(), reference_rms_norm(x, weight, EPS))


@all_dtypes
def test_norm_weights_in_float32(dtype: torch.dtype) -> None:
    x, weight = random(3, 100), random(100, seed=1).float() * 1.001
    ours = rms_norm(guarded(x, dtype), Norm(guarded(weight, torch.float32), EPS), pdl=PDL)
    baseline = reference_rms_norm(x.to(DEVICE, dtype), weight.to(DEVICE), EPS)
    assert_as_good(ours.cpu(), baseline.cpu(), reference_rms_norm(x, weight.double(), EPS))


@all_dtypes
@pytest.mark.parametrize(("tokens", "width"), [(1, 576), (3, 100)])
@pytest.mark.parametrize("wide", [False, True])
def test_norm_add(tokens: int, width: int, wide: bool, dtype: torch.dtype) -> None:
    x, weight, residual = random(tokens, width), random(width, seed=1), random(tokens, width, seed=2)
    weight_dtype = torch.float32 if wide else dtype
    ours, given = guarded(residual, dtype), guarded(x, dtype)
    norm_add(given, Norm(guarded(weight, weight_dtype), EPS), ours, pdl=PDL)
    baseline = residual.to(DEVICE, dtype, copy=True)
    ReferenceKernels().norm_add(x.to(DEVICE, dtype), Norm(weight.to(DEVICE, weight_dtype), EPS), baseline)
    assert_as_good(ours.cpu(), baseline.cpu(), residual + reference_rms_norm(x, weight, EPS))


@all_dtypes
def test_gelu_mul(dtype: torch.dtype) -> None:
    x = random(3, 200) * 4
    x[0, :4] = torch.tensor([-200.0, 200.0, 0.0, 1e-3])
    ours = gelu_mul(guarded(x, dtype), pdl=PDL)
    baseline = activate(x.to(DEVICE, dtype), "gelu_tanh")
    assert_as_good(ours.cpu(), baseline.cpu(), activate(x, "gelu_tanh"))


@all_dtypes
@pytest.mark.parametrize(
    ("tokens", "width"), [(1, 1536), (3, 100), (129, 96), (2, 4096), pytest.param(2049, 14336, marks=big)]
)
def test_silu_mul(tokens: int, width: int, dtype: torch.dtype) -> None:
    x = random(tokens, 2 * width) * 4
    x[0, :2] = torch.tensor([-200.0, 200.0])
    ours = silu_mul(guarded(x, dtype), pdl=PDL)
    gate, up = x.to(DEVICE, dtype).chunk(2, dim=-1)
    exact_gate, exact_up = x.chunk(2, dim=-1)
    assert_as_good(ours.cpu(), (F.silu(gate) * up).cpu(), F.silu(exact_gate) * exact_up)


@all_dtypes
@pytest.mark.parametrize(("tokens", "width"), [(1, 576), (129, 100), (3, 4096)])
def test_embed(tokens: int, width: int, dtype: torch.dtype) -> None:
    vocab = 50
    table = random(vocab, width)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(vocab, (tokens,), generator=generator)
    previous = torch.randint(vocab, (7,), generator=generator)
    sources = torch.randint(-1, 7, (tokens,), generator=generator).int()
    on_device = guarded(table, dtype)
    plain = embed(ids.to(DEVICE), None, None, on_device, pdl=PDL)
    assert torch.equal(plain.cpu(), table[ids].to(dtype))
    late_ids = torch.where(sources >= 0, -(2**40), ids)
    late = embed(late_ids.to(DEVICE), sources.to(DEVICE), previous.to(DEVICE), on_device, pdl=PDL)
    wanted = torch.where(sources >= 0, previous[sources.long()], ids)
    assert torch.equal(late.cpu(), table[wanted].to(dtype))
    feed = DeferredTokens(sources.clamp(min=0), torch.full((7,), NO_TOKEN))
    late = embed(late_ids.to(DEVICE), feed.sources.to(DEVICE), feed.drawn.to(DEVICE), on_device, pdl=PDL)
    assert torch.equal(late.cpu(), table[torch.zeros(tokens, dtype=torch.int64)].to(dtype))
    assert not feed.tokens(late_ids).any()


def run_rope(
    step: Step,
    dtype: torch.dtype,
    norms: tuple[Tensor | None, Tensor | None],
    slots: Tensor,
    planned_tokens: int = 1,
    *,
    norm_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Returns q and the cache after the store, with the tile of a step of `planned_tokens`."""
    cache = step.cache.to(DEVICE, dtype, copy=True)
    q_norm, k_norm = (None if norm is None else guarded(norm, norm_dtype or dtype) for norm in norms)
    positions = torch.where(slots >= 0, step.layout.positions, 2**30)
    q = rope_and_store(
        guarded(step.qkv, dtype),
        replace(step.layer, rope=step.rope.to(DEVICE), q_norm=q_norm, k_norm=k_norm),
        cache,
        replace(step.layout, positions=positions.to(DEVICE), slots=slots.to(DEVICE)),
        pdl=PDL,
        tile=plan_tile(planned_tokens, step.shape, dtype.itemsize),
    )
    return [q.cpu(), cache.cpu()]


def run_reference(
    step: Step,
    dtype: torch.dtype,
    norms: tuple[Tensor | None, Tensor | None],
    norm_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    cache = step.cache_as(dtype)
    q_norm, k_norm = (None if norm is None else norm.to(norm_dtype or dtype) for norm in norms)
    rope = step.rope.to(torch.promote_types(dtype, torch.float32))
    layer = replace(step.layer, rope=rope, q_norm=q_norm, k_norm=k_norm)
    q = ReferenceKernels().rope_and_store(step.qkv.to(dtype), layer, cache, step.layout)
    return [q, cache]


@all_dtypes
@pytest.mark.parametrize("normed", [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize(
    ("shape", "page_tokens"),
    [(heads(9, 3, 64), 16), (heads(8, 1, 128), 128), (heads(4, 4, 96), 48), (heads(2, 1, 256), 16)],
    ids=["9 on 3 of 64", "8 on 1 of 128", "4 on 4 of 96", "2 on 1 of 256"],
)
def test_rope_and_store(shape: AttentionShape, page_tokens: int, normed: tuple[bool, bool], dtype: torch.dtype) -> None:
    head_dim = shape.head_dim
    step = make_step([(1, 130), (3, 20), (1, 1), (1, 49)], shape, page_tokens=page_tokens, filled=False)
    norms = tuple(random(head_dim, seed=number) if given else None for number, given in enumerate(normed))
    chosen = (norms[0], norms[1])
    q, cache = run_rope(step, dtype, chosen, step.layout.slots)
    assert_rotated_and_stored(step, dtype, chosen, q, cache)


@all_dtypes
@pytest.mark.parametrize("planned_tokens", [TINY_TOKENS, SMALL_TOKENS, SMALL_TOKENS + 1])
@pytest.mark.parametrize("shape", [heads(8, 4, 128), heads(6, 3, 64)], ids=["8 on 4 of 128", "6 on 3 of 64"])
def test_rope_in_every_tile(shape: AttentionShape, planned_tokens: int, dtype: torch.dtype) -> None:
    step = make_step([(21, 30), (1, 1), (13, 40)], shape, page_tokens=16, filled=False)
    norms = (random(shape.head_dim), random(shape.head_dim, seed=1))
    q, cache = run_rope(step, dtype, norms, step.layout.slots, planned_tokens)
    assert_rotated_and_stored(step, dtype, norms, q, cache)


PARTIAL = {
    "half": replace(heads(4, 2, 64), rotary_dims=32),
    "three quarters": replace(heads(2, 1, 128), rotary_dims=96),
    "few": replace(heads(2, 2, 80), rotary_dims=20),
}


@all_dtypes
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", PARTIAL.values(), ids=PARTIAL.keys())
def test_a_part_of_each_head_is_rotated(shape: AttentionShape, normed: bool, dtype: torch.dtype) -> None:
    step = make_step([(5, 30), (1, 1)], shape, page_tokens=16, filled=False)
    norms = (random(shape.head_dim), random(shape.head_dim, seed=1)) if normed else (None, None)
    q, cache = run_rope(step, dtype, norms, step.layout.slots, SMALL_TOKENS)
    assert_rotated_and_stored(step, dtype, norms, q, cache)


@all_dtypes
@pytest.mark.parametrize("planned_tokens", [TINY_TOKENS, SMALL_TOKENS + 1])
@pytest.mark.parametrize("shape", [heads(6, 2, 64), PARTIAL["few"]], ids=["6 on 2 of 64", "few"])
def test_norms_of_whole_rows(shape: AttentionShape, planned_tokens: int, dtype: torch.dtype) -> None:
    step = make_step([(5, 30), (1, 1)], shape, page_tokens=16, filled=False)
    norms = (random(shape.heads * shape.head_dim), random(shape.kv_heads * shape.head_dim, seed=1))
    q, cache = run_rope(step, dtype, norms, step.layout.slots, planned_tokens)
    assert_rotated_and_stored(step, dtype, norms, q, cache)


def test_head_norms_in_float32() -> None:
    dtype, wide = DTYPES[-1], torch.float32
    step = make_step([(5, 30), (1, 1)], heads(4, 2, 64), page_tokens=16, filled=False)
    norms = (random(64).float() * 1.001, random(64, seed=1).float() * 1.001)
    q, cache = run_rope(step, dtype, norms, step.layout.slots, norm_dtype=wide)
    base_q, base_cache = run_reference(step, dtype, norms, wide)
    exact_q, exact_cache = run_reference(step, torch.float64, norms)
    written = ~exact_cache.isnan()
    assert_as_good(q, base_q, exact_q)
    assert_as_good(cache[written], base_cache[written], exact_cache[written])


@pytest.mark.parametrize("planned_tokens", [1, SMALL_TOKENS + 1])
def test_pages_whose_heads_are_outermost(planned_tokens: int) -> None:
    step = make_step([(5, 30), (1, 1)], heads(4, 2, 64), page_tokens=16, filled=False)
    turned = replace(step, cache=head_major(step.cache))
    for case in (step, turned):
        q, cache = run_rope(case, torch.float32, (None, None), step.layout.slots, planned_tokens)
        assert_rotated_and_stored(step, torch.float32, (None, None), q, cache)


@pytest.mark.parametrize("tokens", [1, 64, 65, 2048])
@pytest.mark.parametrize("shape", [heads(32, 8, 128), heads(9, 3, 64), heads(8, 1, 256), heads(4, 4, 96)])
def test_a_tile_holds_heads_of_one_kind(shape: AttentionShape, tokens: int) -> None:
    tile = plan_tile(tokens, shape, 2)
    assert shape.heads % tile.group == shape.kv_heads % tile.group == 0
    assert tile.tokens & (tile.tokens - 1) == 0


def assert_rotated_and_stored(
    step: Step, dtype: torch.dtype, chosen: tuple[Tensor | None, Tensor | None], q: Tensor, cache: Tensor
) -> None:
    """Checks that q and keys are as good as the reference, values are exact copies, and nothing else is written."""
    base_q, base_cache = run_reference(step, dtype, chosen)
    exact_q, exact_cache = run_reference(step, torch.float64, chosen)
    assert_as_good(q, base_q, exact_q)
    written = ~exact_cache.isnan()
    assert torch.equal(cache.isnan(), ~written)
    assert_as_good(cache[written], base_cache[written], exact_cache[written])
    page_tokens = cache.shape[4]
    page, offset = step.layout.slots // page_tokens, step.layout.slots % page_tokens
    assert torch.equal(cache[page, LAYER, 1, :, offset], base_cache[page, LAYER, 1, :, offset])


@pytest.mark.parametrize("planned_tokens", [1, SMALL_TOKENS + 1])
def test_a_padded_row_is_stored_nowhere(planned_tokens: int) -> None:
    step = make_step([(1, 5), (1, 17), (1, 33)], heads(4, 2, 64), filled=False)
    slots = step.layout.slots.clone()
    slots[1] = -1
    q, cache = run_rope(step, torch.float32, (None, None), slots, planned_tokens)
    exact_q, exact_cache = run_reference(step, torch.float64, (None, None))
    page, offset = step.layout.slots // 16, step.layout.slots % 16
    exact_cache[page[1], LAYER, :, :, offset[1]] = float("nan")
    assert torch.equal(cache.isnan(), exact_cache.isnan())
    torch.testing.assert_close(q[[0, 2]].double(), exact_q[[0, 2]], atol=1e-5, rtol=1e-5)


@big
def test_offsets_beyond_32_bits() -> None:
    """The cache has more than 2³¹ elements, and its last page is the only one used."""
    page_tokens, head_dim, pages = 128, 128, 20_000
    cache = torch.empty(pages, 1, 2, 8, page_tokens, head_dim, dtype=torch.bfloat16, device=DEVICE)
    layer = AttentionLayer(0, heads(32, 8, head_dim), torch.ones(4, head_dim, device=DEVICE))
    qkv = random(1, 48 * head_dim).to(DEVICE, torch.bfloat16)
    values = qkv.view(48, head_dim)[40:].clone()
    slot = torch.tensor([pages * page_tokens - 1], device=DEVICE)
    position = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    layout = replace(make_step([(1, 4)], layer.shape).layout, positions=position, slots=slot)
    rope_and_store(qkv, layer, cache, layout, pdl=PDL)
    assert torch.equal(cache[-1, 0, 1, :, -1], values)
