"""Statistics of the inputs of a layer's products on sample text.

Calibrated methods minimize the error for these inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.kernels.layers import Linear
from tandem.engine.kernels.reference import ReferenceKernels


@dataclass(slots=True)
class InputStatistics:
    """Sums over the tokens that a product with K inputs has processed. All are float32."""

    gram: Tensor
    """[K, K]: the sum of x · xᵀ.

    For an error E [N, K] of the weight, the squared error of the outputs is tr(E·gram·Eᵀ).
    """
    total: Tensor
    """[K]: the sum of |x|."""
    largest: Tensor
    """[K]: the largest |x|."""
    tokens: int = 0

    @classmethod
    def zero(cls, inputs: int, device: torch.device) -> "InputStatistics":
        """Return the statistics of no tokens."""
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
        """Add inputs [T, K] float32."""
        self.gram.addmm_(x.T, x)
        sizes = x.abs()
        self.total += sizes.sum(0)
        self.largest = torch.maximum(self.largest, sizes.amax(0))
        self.tokens += len(x)

    def divided(self, scales: Tensor) -> "InputStatistics":
        """Return the statistics of the inputs divided by scales [K]."""
        return InputStatistics(
            self.gram / scales[:, None] / scales, self.total / scales, self.largest / scales, self.tokens
        )

    def error(self, difference: Tensor) -> Tensor:
        """Return the squared error of the outputs for `difference` [N, K], summed over outputs and tokens."""
        return (difference @ self.gram * difference).sum()


class CalibrationKernels(ReferenceKernels):
    """The reference kernels, which also collect the input statistics of each weight in `statistics`."""

    def __init__(self) -> None:
        self.statistics: dict[int, InputStatistics] = {}
        """The statistics of each product, by the address of its weight; empty = nothing is collected."""

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Add the inputs to the statistics, and compute the product."""
        assert isinstance(linear.weight, Tensor)
        found = self.statistics.get(linear.weight.data_ptr())
        if found is not None:
            found.add(x)
        return super().linear(x, linear)
