"""Products: as exact as PyTorch's in the same dtype, and the same bits whatever else is in the step."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.cpu.kernels import CpuKernels
from tandem.engine.kernels.cpu.long_products import LONG_TOKENS
from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.protocol.errors import Internal
from tests.kernels.steps import assert_as_good

REFERENCE = ReferenceKernels()
EPS = 1e-5
SHORT = [1, 2, 3, 7, 8, 9, 15, 16, 17, LONG_TOKENS - 1]
LONG = [LONG_TOKENS, 127, 128, 129]
SHAPES = [(64, 96), (576, 192), (100, 37), (1537, 24), (2600, 70)]
"""(k, rows): one block of k and several, whole vectors and tails, whole tiles and remainders."""


class Product:
    """Random inputs that every dtype holds exactly."""

    def __init__(self, tokens: int, k: int, rows: int, bias: bool, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator).bfloat16().double()

        self.x, self.norm, self.residual = random(tokens, k), random(k), random(tokens, rows)
        self.linear = Linear(random(rows, k) / 8, random(rows) if bias else None)

    def linear_as(self, dtype: torch.dtype) -> Linear:
        bias = self.linear.bias
        return Linear(self.linear.weight.to(dtype), None if bias is None else bias.to(dtype))

    def norm_linear(self, kernels: Kernels, dtype: torch.dtype, tokens: slice = slice(None)) -> Tensor:
        return kernels.norm_linear(self.x[tokens].to(dtype), Norm(self.norm.to(dtype), EPS), self.linear_as(dtype))

    def norm_gate_up(self, kernels: Kernels, dtype: torch.dtype, tokens: slice = slice(None)) -> Tensor:
        return kernels.norm_gate_up(self.x[tokens].to(dtype), Norm(self.norm.to(dtype), EPS), self.linear_as(dtype))

    def linear_add(self, kernels: Kernels, dtype: torch.dtype, tokens: slice = slice(None)) -> Tensor:
        # A copy: where the dtype is the tensor's own, `to` returns the tensor itself.
        hidden = self.residual[tokens].to(dtype, copy=True)
        kernels.linear_add(self.x[tokens].to(dtype), self.linear_as(dtype), hidden)
        return hidden

    def wide_norm_linear(self, kernels: Kernels, dtype: torch.dtype) -> Tensor:
        norm = Norm(self.norm.to(torch.promote_types(dtype, torch.float32)), EPS)
        return kernels.norm_linear(self.x.to(dtype), norm, self.linear_as(dtype))

    def norm_gelu(self, kernels: Kernels, dtype: torch.dtype) -> Tensor:
        norm = Norm(self.norm.to(dtype), EPS)
        return kernels.norm_gate_up(self.x.to(dtype), norm, self.linear_as(dtype), "gelu_tanh")


Operation = Callable[..., Tensor]
OPERATIONS: list[Operation] = [Product.norm_linear, Product.norm_gate_up, Product.linear_add]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("k", "rows"), SHAPES)
@pytest.mark.parametrize("counts", [SHORT, LONG], ids=["short", "long"])
def test_products_are_as_exact_as_torch(  # noqa: PLR0917
    operation: Operation, k: int, rows: int, counts: list[int], kernels: CpuKernels, dtype: torch.dtype
) -> None:
    rows += rows % 2  # gate and up are halves
    ours, baseline, exact = [], [], []
    for number, tokens in enumerate(counts):
        product = Product(tokens, k, rows, bias=number % 2 == 1, seed=tokens)
        ours.append(operation(product, kernels, dtype))
        baseline.append(operation(product, REFERENCE, dtype))
        exact.append(operation(product, REFERENCE, torch.float64))
        assert_close_by_row(ours[-1], exact[-1])
    # All counts together: the largest of few errors is random.
    assert_as_good(torch.cat(ours), torch.cat(baseline), torch.cat(exact))


def assert_close_by_row(ours: Tensor, exact: Tensor) -> None:
    assert ((ours.double() - exact).norm(dim=1) <= 64 * torch.finfo(ours.dtype).eps * exact.norm(dim=1)).all()


def test_products_of_a_long_prompt_whose_rows_fill_no_piece(kernels: CpuKernels, dtype: torch.dtype) -> None:
    product = Product(1025, 64, 290, bias=True)
    for operation in OPERATIONS:
        exact = operation(product, REFERENCE, torch.float64)
        assert_as_good(operation(product, kernels, dtype), operation(product, REFERENCE, dtype), exact)


@pytest.mark.parametrize("operation", [Product.wide_norm_linear, Product.norm_gelu])
def test_norm_weights_in_float32_and_gelu(operation: Operation, kernels: CpuKernels, dtype: torch.dtype) -> None:
    products = [Product(tokens, 100, 38, bias=tokens == 3, seed=tokens) for tokens in (1, 3, LONG_TOKENS)]
    ours, baseline = (torch.cat([operation(product, of, dtype) for product in products]) for of in (kernels, REFERENCE))
    exact = torch.cat([operation(product, REFERENCE, torch.float64) for product in products])
    assert_as_good(ours, baseline, exact)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_row_is_the_same_alone_and_in_any_batch(
    operation: Operation, kernels: CpuKernels, dtype: torch.dtype
) -> None:
    for k, rows in SHAPES:
        product = Product(LONG_TOKENS - 1, k, rows + rows % 2, bias=True)
        together = operation(product, kernels, dtype)
        for tokens in (slice(0, 1), slice(3, 4), slice(0, 3), slice(5, 12), slice(2, 10), slice(1, 18)):
            assert torch.equal(operation(product, kernels, dtype, tokens), together[tokens])


@pytest.mark.parametrize("tokens", [1, 9, 130])
def test_the_number_of_threads_changes_nothing(tokens: int, kernels: CpuKernels, dtype: torch.dtype) -> None:
    alone = CpuKernels(dtype, threads=1)
    product = Product(tokens, 576, 192, bias=False)
    for operation in OPERATIONS:
        assert torch.equal(operation(product, alone, dtype), operation(product, kernels, dtype))


def test_extreme_gates_stay_finite(kernels: CpuKernels, dtype: torch.dtype) -> None:
    weight = torch.cat((torch.eye(4) * 60, torch.eye(4))).to(dtype)
    hidden = torch.tensor([[1.0, -1.0, 1.0, -1.0]]).to(dtype)
    result = kernels.norm_gate_up(hidden, Norm(torch.full((4,), 4.0).to(dtype), EPS), Linear(weight))
    assert torch.allclose(result.float(), torch.tensor([[960.0, 0.0, 960.0, 0.0]]), rtol=1e-2, atol=1e-6)


def test_a_nan_stays_in_its_row(kernels: CpuKernels, dtype: torch.dtype) -> None:
    product = Product(9, 64, 32, bias=False)
    clean = product.norm_linear(kernels, dtype)
    product.x[4, 7] = float("nan")
    result = product.norm_linear(kernels, dtype)
    assert result[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(result[others], clean[others])


def test_weights_that_would_be_misread_are_refused(kernels: CpuKernels, dtype: torch.dtype) -> None:
    weight = torch.zeros(8, 8, dtype=dtype)
    assert kernels.prepare(Linear(weight)).weight is weight
    for wrong in (weight.double(), torch.zeros(8, 16, dtype=dtype)[:, ::2]):
        with pytest.raises(Internal):
            kernels.prepare(Linear(wrong))
