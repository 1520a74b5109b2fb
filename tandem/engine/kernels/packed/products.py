"""Selects the products for each form of packed weight on GPUs: with unquantized inputs, or with 8-bit inputs."""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.kernels.packed import packed_products, scaled_products, w4a8_products
from tandem.engine.kernels.packed.scaled_weight import ScaledWeight
from tandem.engine.kernels.packed_weight import PackedWeight, Weight
from tandem.engine.kernels.unpacked import unpacked


class PackedProducts(Protocol):
    """Interface of the products with one form of prepared weight, as in `base.Products`."""

    def norm_linear(self, hidden: Tensor, norm: Norm | None, linear: Linear, *, pdl: bool) -> Tensor:
        """Return RMSNorm(hidden) · weightᵀ + bias."""

    def norm_gate_up(
        self, hidden: Tensor, norm: Norm | None, gate_up: Linear, *, pdl: bool, activation: str = "silu"
    ) -> Tensor:
        """Return activation(g) · u with [g | u] = RMSNorm(hidden) · weightᵀ + bias."""

    def linear_add(self, x: Tensor, linear: Linear, hidden: Tensor, *, pdl: bool) -> None:
        """Add x · weightᵀ + bias to `hidden` in place."""

    def norms_apart(self, hidden: Tensor) -> bool:
        """Return True if the products launch the norm of `hidden` as a kernel of its own."""


def products_of(weight: PackedWeight, tokens: int, dtype: torch.dtype) -> PackedProducts:
    """Return the products of a step of `tokens` tokens in `dtype`, for a weight that `prepared` has returned."""
    return scaled_products if quantizes_inputs(weight, tokens, dtype) else packed_products


def quantizes_inputs(weight: Weight, tokens: int, dtype: torch.dtype) -> bool:
    """Return True if a step of `tokens` tokens in `dtype` quantizes the inputs of this weight's products."""
    if not isinstance(weight, PackedWeight):
        return False
    return isinstance(weight, ScaledWeight) or w4a8_products.quantizes_inputs(tokens, weight, dtype)


def prepared(linear: Linear, dtype: torch.dtype) -> Linear:
    """Return the linear layer with its weight as kernels read it, or dequantized if no kernel multiplies it."""
    weight = linear.weight
    if isinstance(weight, PackedWeight):
        for products in (scaled_products, packed_products):
            if products.multiplies(weight):
                return replace(linear, weight=products.prepared(weight))
    return unpacked(linear, dtype)


def dequantized_for(tokens: int, linear: Linear, dtype: torch.dtype) -> Linear:
    """Return the linear layer with a dequantized weight if a step of `tokens` tokens needs one, else unchanged."""
    weight = linear.weight
    if type(weight) is not PackedWeight or weight.shape.numel() > packed_products.SCRATCH_ITEMS:
        return linear
    if packed_products.fuses(tokens, weight) or quantizes_inputs(weight, tokens, dtype):
        return linear
    matrix = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    packed_products.dequantize(weight, matrix)
    return Linear(matrix, linear.bias)
