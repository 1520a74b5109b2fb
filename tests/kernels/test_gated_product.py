"""The product of gate and up with its activation: the choice, and that every choice computes the same."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.kernels.layers import Linear
from tandem.engine.kernels.linear.gated_product import (
    FUSED_TOKENS,
    FusedGated,
    PlainGated,
    choose_gated_product,
)
from tandem.engine.kernels.triton_launch import overlaps_launches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PDL = overlaps_launches()
_ON_GPU = DEVICE.type == "cuda"
TOKENS = (1, 127, FUSED_TOKENS - 1, FUSED_TOKENS, FUSED_TOKENS + 1, 4097) if _ON_GPU else (1, 9, 127, 128, 129)
FEWEST_NUMBERS = 1000
"""The minimum number of elements by which an error is judged."""
SHAPES = ((1024, 3072), (2048, 8192), (4096, 3072), (264, 200)) if _ON_GPU else ((64, 48),)


class _Never:
    """Replaces the plain path or the fused one where it must not be taken."""

    def __call__(self, x: Tensor, gate_up: Linear) -> Tensor:
        raise AssertionError("the other path was taken")


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


def _inputs(tokens: int, hidden: int, intermediate: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
    weight = (torch.randn(2 * intermediate, hidden, device=DEVICE) * hidden**-0.5).to(dtype)
    return x, weight


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("hidden", "intermediate"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_pytorchs(tokens: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
    """The number of elements is large enough that none decides: one in forty-eight is rounded better by chance."""
    draws = -(-FEWEST_NUMBERS // (tokens * intermediate))
    ours_off, baseline_off = [], []
    for _ in range(draws):
        x, weight = _inputs(tokens, hidden, intermediate, dtype)
        gate, up = _halves(F.linear(x.double(), weight.double()))
        exact = F.silu(gate) * up
        gate, up = _halves(F.linear(x, weight))

        ours = choose_gated_product(DEVICE, dtype, hidden, intermediate, pdl=PDL)(x, Linear(weight))

        assert ours.shape == exact.shape
        assert ours.dtype == dtype
        ours_off.append(ours - exact)
        baseline_off.append(F.silu(gate) * up - exact)
    assert torch.cat(ours_off).norm() <= 2 * torch.cat(baseline_off).norm()


def test_a_bias_is_added_before_the_activation() -> None:
    x, weight = _inputs(TOKENS[-1], *SHAPES[0], torch.float16)
    bias = torch.randn(len(weight), device=DEVICE).to(torch.float16)
    gate, up = _halves(F.linear(x.double(), weight.double(), bias.double()))

    ours = choose_gated_product(DEVICE, torch.float16, *SHAPES[0], pdl=PDL)(x, Linear(weight, bias))

    torch.testing.assert_close(ours.double(), F.silu(gate) * up, rtol=1e-2, atol=1e-2)


def test_the_cpu_takes_the_plain_path() -> None:
    assert isinstance(choose_gated_product(torch.device("cpu"), torch.bfloat16, 64, 48, pdl=False), PlainGated)


@pytest.mark.skipif(not _ON_GPU, reason="needs a CUDA GPU")
def test_long_prompts_take_the_fused_path() -> None:
    pytest.importorskip("quack.gemm_interface")
    assert isinstance(choose_gated_product(DEVICE, torch.bfloat16, 1024, 3072, pdl=PDL), FusedGated)
    x, weight = _inputs(FUSED_TOKENS, 1024, 3072, torch.bfloat16)
    assert FusedGated(_Never())(x, Linear(weight)).shape == (FUSED_TOKENS, 3072)
    with pytest.raises(AssertionError):
        FusedGated(_Never())(x[:-1], Linear(weight))


@pytest.mark.skipif(not _ON_GPU, reason="needs a CUDA GPU")
def test_float32_takes_the_plain_path() -> None:
    assert isinstance(choose_gated_product(DEVICE, torch.float32, 1024, 3072, pdl=PDL), PlainGated)
