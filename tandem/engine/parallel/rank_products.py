"""The products of one rank: its output products are terms of sums over all ranks."""

import torch
from torch import Tensor

from tandem.engine.kernels.base import Products
from tandem.engine.kernels.layers import ExpertsLayer, Linear, Norm
from tandem.engine.parallel.collectives import Collectives


class RankProducts(Products):
    """The products of `base`, a rank's own kernels with or without adapters, with sums over the ranks.

    The inputs of `linear` and `linear_add` are divided among the ranks, and so are the weights of experts.
    """

    def __init__(self, base: Products, collectives: Collectives) -> None:
        self._base, self._collectives = base, collectives

    def prepare(self, linear: Linear) -> Linear:
        """Let `base` prepare the weight."""
        return self._base.prepare(linear)

    def norm_linear(self, hidden: Tensor, norm: Norm, linear: Linear) -> Tensor:
        """Compute this rank's outputs."""
        return self._base.norm_linear(hidden, norm, linear)

    def norm_gate_up(self, hidden: Tensor, norm: Norm, gate_up: Linear, activation: str = "silu") -> Tensor:
        """Compute this rank's inner elements."""
        return self._base.norm_gate_up(hidden, norm, gate_up, activation)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Compute the term of this rank, and sum the terms."""
        term = self._base.linear(x, linear)
        self._collectives.all_reduce(term)
        return term

    def linear_add(self, x: Tensor, linear: Linear, hidden: Tensor) -> None:
        """Add the sum of the terms."""
        hidden += self.linear(x, linear)

    def experts(self, hidden: Tensor, layer: ExpertsLayer, slots: Tensor, out: Tensor) -> None:
        """Compute the experts' inner elements of this rank, and add the sum of the terms."""
        term = torch.zeros_like(out)
        self._base.experts(hidden, layer, slots, term)
        self._collectives.all_reduce(term)
        out += term
