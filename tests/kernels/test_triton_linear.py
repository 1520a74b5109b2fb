"""Weight-streaming products: as exact as PyTorch's in the same dtype, nothing read or written outside the tensors."""

import pytest
import torch

from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.kernels.linear import triton_linear as ours
from tandem.engine.kernels.linear.triton_linear_plan import tile_for
from tandem.engine.kernels.linear.triton_linear_tiles import Gemv, Skinny, Tile
from tandem.engine.kernels.triton_launch import overlaps_launches

from .product_cases import DEVICE, EPS, Case, check, guarded, make_case, run

# Triton's interpreter multiplies the bit patterns of bfloat16 as integers: float16 is tested for both on the CPU.
SIXTEEN = [torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
ALL = [*SIXTEEN, torch.float32]
TOKENS = [1, 2, 3, 8, 17, 64, 100]
AROUND_A_TILE = [127, 128, 129, 257]

OPS = [ours.STORE.value, ours.GATE_UP.value, ours.ADD.value]
OP_NAMES = ["store", "gate_up", "add"]


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("op", OPS, ids=OP_NAMES)
def test_as_exact_as_torch_for_any_number_of_tokens(op: int, dtype: torch.dtype) -> None:
    norm = op != ours.ADD.value
    check(op, [make_case(t, 70, 100, bias=t % 2 == 1, norm=norm, seed=t) for t in TOKENS], dtype)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("op", OPS, ids=OP_NAMES)
def test_as_exact_as_torch_around_the_largest_tile_of_tokens(op: int, dtype: torch.dtype) -> None:
    norm = op != ours.ADD.value
    check(op, [make_case(t, 34, 60, bias=t % 2 == 1, norm=norm, seed=t) for t in AROUND_A_TILE], dtype)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("op", OPS, ids=OP_NAMES)
@pytest.mark.parametrize(("n", "k"), [(100, 1536), (576, 100), (50, 576)])
def test_as_exact_as_torch_for_sizes_beside_the_tiles(n: int, k: int, op: int, dtype: torch.dtype) -> None:
    cases = [make_case(t, n, k, bias=t == 3, norm=op != ours.ADD.value, seed=t) for t in (1, 3)]
    check(op, cases, dtype)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("op", OPS, ids=OP_NAMES)
@pytest.mark.parametrize("norm", [False, True])
def test_norm_and_bias_are_optional(norm: bool, op: int, dtype: torch.dtype) -> None:
    check(op, [make_case(t, 48, 64, bias=b, norm=norm, seed=t) for t in (1, 5) for b in (False, True)], dtype)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("op", OPS[:2], ids=OP_NAMES[:2])
def test_outliers_in_the_input(op: int, dtype: torch.dtype) -> None:
    check(op, [make_case(t, 64, 160, outliers=True, seed=t) for t in (1, 2, 17)], dtype)


TILES = [
    Gemv(4, 64, 4),
    Gemv(2, 128, 4),
    Gemv(1, 512, 4),
    Skinny(64, 16, 64, splits=1, stages=3, warps=4, early=256),
    Skinny(64, 16, 32, splits=3, stages=3, warps=4, early=512),
    Skinny(32, 32, 64, splits=4, stages=2, warps=4),
    Skinny(16, 16, 128, splits=8, stages=2, warps=4),
]


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
@pytest.mark.parametrize("op", OPS, ids=OP_NAMES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_kind_of_tile(tile: Tile, op: int, dtype: torch.dtype) -> None:
    counts = (1,) if isinstance(tile, Gemv) else (1, 2, 16, 19)
    check(op, [make_case(t, 100, 200, bias=True, norm=op != ours.ADD.value, seed=t) for t in counts], dtype, tile)
    if isinstance(tile, Skinny) and tile.splits > 1:
        assert not ours.reserve_scratch(torch.empty(0, device=DEVICE).device)[1].any()


SPLIT = Skinny(32, 16, 32, splits=4, stages=2, warps=4)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("tile", [None, SPLIT], ids=["planned", "split"])
def test_gelu_of_the_gate(tile: Tile | None, dtype: torch.dtype) -> None:
    cases = [make_case(t, 50, 100, bias=t == 3, seed=t) for t in ((1, 3, 17) if tile is None else (3, 17))]
    check(ours.GATE_UP.value, cases, dtype, tile, activation="gelu_tanh")


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
@pytest.mark.parametrize("op", OPS[:2], ids=OP_NAMES[:2])
def test_norm_weights_in_float32(op: int, dtype: torch.dtype) -> None:
    check(op, [make_case(t, 50, 100, seed=t) for t in (1, 3, 17)], dtype, norm_dtype=torch.float32)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("op", OPS, ids=OP_NAMES)
def test_the_same_bits_in_every_run(op: int, dtype: torch.dtype) -> None:
    split = Skinny(32, 16, 32, splits=4, stages=2, warps=4)
    for tile in (None, split):
        case = make_case(9, 64, 256, bias=True, norm=op != ours.ADD.value)
        first = run(op, case, dtype, tile)
        assert all(torch.equal(first, run(op, case, dtype, tile)) for _ in range(2))


@pytest.mark.parametrize("op", OPS, ids=OP_NAMES)
def test_a_float32_row_has_the_same_bits_alone_and_in_any_step(op: int) -> None:
    whole = make_case(37, 40, 100, bias=True, norm=op != ours.ADD.value)
    together = run(op, whole, torch.float32)
    for rows in (slice(0, 1), slice(20, 21), slice(3, 5), slice(9, 30)):
        part = Case(whole.x[rows], whole.norm, whole.weight, whole.bias, whole.residual[rows])
        assert torch.equal(run(op, part, torch.float32), together[rows])


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_the_public_functions(dtype: torch.dtype) -> None:
    case = make_case(3, 64, 96, bias=True)
    assert case.norm is not None
    assert case.bias is not None
    x, scale, weight, bias = (guarded(t, dtype) for t in (case.x, case.norm, case.weight, case.bias))
    norm, linear = Norm(scale, EPS), Linear(weight, bias)
    pdl = overlaps_launches()
    store, gate_up, add = OPS
    assert torch.equal(ours.norm_linear(x, norm, linear, pdl=pdl).cpu(), run(store, case, dtype))
    assert torch.equal(ours.norm_gate_up(x, norm, linear, pdl=pdl).cpu(), run(gate_up, case, dtype))
    hidden = guarded(case.residual, dtype)
    ours.linear_add(x, linear, hidden, pdl=pdl)
    plain = Case(case.x, None, case.weight, case.bias, case.residual)
    assert torch.equal(hidden.cpu(), run(add, plain, dtype))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_extreme_gates_stay_finite() -> None:
    case = Case(
        torch.tensor([[1.0, -1.0, 1.0, -1.0]]).double(),
        torch.full((4,), 4.0).double(),
        torch.cat((torch.eye(4) * 60, torch.eye(4))).double(),
        None,
        torch.zeros(1, 4).double(),
    )
    result = run(ours.GATE_UP.value, case, torch.float16)
    assert torch.allclose(result.float(), torch.tensor([[960.0, 0.0, 960.0, 0.0]]), rtol=1e-2, atol=1e-6)


def test_the_plan_has_a_tile_for_every_size() -> None:
    for n, k in ((28672, 4096), (4096, 14336), (6144, 1024), (1024, 3072), (151936, 1024), (576, 1536), (70, 100)):
        for paired in (False, True):
            assert isinstance(tile_for(1, n, k, paired, 2), Gemv)
            for tokens in (2, 16, 33, 128, 1000):
                tile = tile_for(tokens, n, k, paired, 2)
                assert isinstance(tile, Skinny)
                assert tile.tokens >= min(tokens, 128)
            assert tile_for(1, n, k, paired, 4) == tile_for(100, n, k, paired, 4)
    assert ours.streams(1, 4096, 4096, 2)
    assert not ours.streams(4096, 4096, 4096, 2)
