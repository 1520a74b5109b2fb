"""The cases of every weight-streaming product: random inputs between NaN, with PyTorch's result as the baseline."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.kernels.linear import triton_linear as ours
from tandem.engine.kernels.linear.triton_linear_tiles import Tile
from tandem.engine.kernels.reference import ReferenceKernels, activate, rms_norm
from tandem.engine.kernels.triton_launch import overlaps_launches

from .steps import assert_as_good

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REFERENCE = ReferenceKernels()
EPS = 1e-5
GUARD = 256
"""Elements of NaN before and after each tensor: more than any tile's overhang would skip."""


def guarded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a copy of `values` on the device with NaN around it."""
    memory = torch.full((values.numel() + 2 * GUARD,), float("nan"), dtype=dtype, device=DEVICE)
    held = memory[GUARD : GUARD + values.numel()].view(values.shape)
    held.copy_(values)
    return held


def guards_of(held: Tensor) -> Tensor:
    memory = torch.as_strided(held, (held.numel() + 2 * GUARD,), (1,), held.storage_offset() - GUARD)
    return torch.cat((memory[:GUARD], memory[-GUARD:]))


@dataclass(frozen=True)
class Case:
    """Random inputs that every dtype holds exactly, in float64: x [T, K], weight [N, K], residual [T, N].

    They are on the device on which PyTorch computes the baseline and the exact result.
    """

    x: Tensor
    norm: Tensor | None
    weight: Tensor
    bias: Tensor | None
    residual: Tensor


def make_case(
    tokens: int,
    n: int,
    k: int,
    *,
    bias: bool = False,
    norm: bool = True,
    outliers: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Case:
    generator = torch.Generator(device).manual_seed(seed)

    def random(*sizes: int) -> Tensor:
        numbers = torch.randn(*sizes, generator=generator, device=device)
        return (numbers * 64).round().clamp(-255, 255).double() / 64

    x = random(tokens, k)
    if outliers:
        x[:, 3 % k] *= 2048
        x[-1] *= 8
    return Case(x, random(k) if norm else None, random(n, k) / 8, random(n) if bias else None, random(tokens, n))


def run(
    op: int,
    case: Case,
    dtype: torch.dtype,
    tile: Tile | None = None,
    *,
    activation: str = "silu",
    norm_dtype: torch.dtype | None = None,
) -> Tensor:
    """Runs one product by the kernels under test, its output poisoned before and its surroundings checked after."""
    paired = op == ours.GATE_UP.value
    tokens, n = case.x.shape[0], case.weight.shape[0] // (2 if paired else 1)
    fresh = torch.full((tokens, n), float("nan"))
    out = guarded(case.residual if op == ours.ADD.value else fresh, dtype)
    x, weight = guarded(case.x, dtype), guarded(case.weight, dtype)
    norm = None if case.norm is None else Norm(guarded(case.norm, norm_dtype or dtype), EPS)
    bias = None if case.bias is None else guarded(case.bias, dtype)
    gelu = activation == "gelu_tanh"
    ours.launch(x, norm, Linear(weight, bias), out, op, pdl=overlaps_launches(), tile=tile, gelu=gelu)
    assert guards_of(out).isnan().all()
    return out.to(case.x.device)


def torch_run(
    op: int, case: Case, dtype: torch.dtype, activation: str = "silu", norm_dtype: torch.dtype | None = None
) -> Tensor:
    """Runs the same product in plain PyTorch."""
    x = case.x.to(dtype)
    if case.norm is not None:
        x = rms_norm(x, case.norm.to(norm_dtype or dtype), EPS)
    linear = Linear(case.weight.to(dtype), None if case.bias is None else case.bias.to(dtype))
    if op == ours.ADD.value:
        hidden = case.residual.to(dtype, copy=True)
        REFERENCE.linear_add(x, linear, hidden)
        return hidden
    product = torch.nn.functional.linear(x, linear.weight, linear.bias)
    if op == ours.STORE.value:
        return product
    return activate(product, activation)


def check(
    op: int,
    cases: list[Case],
    dtype: torch.dtype,
    tile: Tile | None = None,
    *,
    activation: str = "silu",
    norm_dtype: torch.dtype | None = None,
) -> None:
    """Checks all cases together, as the largest of few errors is random."""
    actual = torch.cat(
        [run(op, case, dtype, tile, activation=activation, norm_dtype=norm_dtype).flatten() for case in cases]
    )
    baseline = torch.cat([torch_run(op, case, dtype, activation, norm_dtype).flatten() for case in cases])
    exact = torch.cat([torch_run(op, case, torch.float64, activation).flatten() for case in cases])
    assert_as_good(actual, baseline, exact)
