"""Statistics of the inputs of linear layers on sample text.

Calibrated methods minimize the output error for inputs with these statistics.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.kernels.layers import Linear
from tandem.engine.kernels.reference import ReferenceKernels


@dataclass(slots=True)
class InputStatistics:
    """Statistics of the K inputs of a linear layer over all tokens: sums and maxima, in float32."""

    gram: Tensor
    """[K, K]: the sum of x · xᵀ over the tokens.

    An error E [N, K] of the weight causes the squared output error tr(E·gram·Eᵀ).
    """
    total: Tensor
    """[K]: the sum of |x| over the tokens."""
    largest: Tensor
    """[K]: the maximum of |x| over the tokens."""
    tokens: int = 0

    @classmethod
    def zero(cls, inputs: int, device: torch.device) -> "InputStatistics":
        """Return empty statistics, of no tokens."""
        return cls(
            torch.zeros(inputs, inputs, device=device),
            torch.zeros(inputs, device=device),
            torch.zeros(inputs, device=device),
        )

    @property
    def mean(self) -> Tensor:
        """[K]: the mean of |x| over the tokens."""
        return self.total / self.tokens

    def add(self, x: Tensor) -> None:
        """Add the inputs [T, K] float32 of T tokens."""
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
        """Return the squared output error that the weight error `difference` [N, K] causes, over outputs and tokens."""
        return (difference @ self.gram * difference).sum()


class CalibrationKernels(ReferenceKernels):
    """The reference kernels, which also collect statistics of the inputs of linear layers."""

    def __init__(self) -> None:
        self.statistics: dict[int, InputStatistics] = {}
        """The input statistics of each linear layer, by the address of its weight; empty = nothing is collected."""

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Compute a linear layer, and add its inputs to the statistics of its weight."""
        assert isinstance(linear.weight, Tensor)
        statistics = self.statistics.get(linear.weight.data_ptr())
        if statistics is not None:
            statistics.add(x)
        return super().linear(x, linear)
