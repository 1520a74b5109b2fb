"""The inputs of a layer's products on sample text, which calibrated methods minimise the error for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.kernels.layers import Linear
from tandem.engine.kernels.reference import ReferenceKernels


@dataclass(slots=True)
class InputStatistics:
    """Sums over the tokens that a product with K inputs has seen. All float32."""

    gram: Tensor
    """[K, K]: the sum of x · xᵀ. The squared error of the outputs for an error E [N, K] of the weight is tr(E·gram·Eᵀ).
    """
    total: Tensor
    """[K]: the sum of |x|."""
    largest: Tensor
    """[K]: the largest |x|."""
    tokens: int = 0

    @classmethod
    def zero(cls, inputs: int, device: torch.device) -> "InputStatistics":
        """Returns the statistics of no tokens."""
        return cls(
            torch.zeros(inputs, inputs, device=device),
            torch.zeros(inputs, device=device),
            torch.zeros(inputs, device=device),
        )

    @property
    def mean(self) -> Tensor:
        """[K]: the mean of |x|."""
        return self.total / self.tokens

    def add(self, x: Tensor) -> None:
        """Adds inputs [T, K] float32."""
        self.gram.addmm_(x.T, x)
        sizes = x.abs()
        self.total += sizes.sum(0)
        self.largest = torch.maximum(self.largest, sizes.amax(0))
        self.tokens += len(x)

    def divided(self, scales: Tensor) -> "InputStatistics":
        """Returns the statistics of the inputs divided by scales [K]."""
        return InputStatistics(
            self.gram / scales[:, None] / scales, self.total / scales, self.largest / scales, self.tokens
        )

    def error(self, difference: Tensor) -> Tensor:
        """Returns the squared error of the outputs, summed over them and all tokens, for `difference` [N, K]."""
        return (difference @ self.gram * difference).sum()


class CalibrationKernels(ReferenceKernels):
    """The reference's kernels, which add up the inputs of each weight in `statistics`."""

    def __init__(self) -> None:
        self.statistics: dict[int, InputStatistics] = {}
        """The statistics of each product, by its weight's address; empty = nothing is added up."""

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Adds up the inputs and computes the product."""
        assert isinstance(linear.weight, Tensor)
        found = self.statistics.get(linear.weight.data_ptr())
        if found is not None:
            found.add(x)
        return super().linear(x, linear)
