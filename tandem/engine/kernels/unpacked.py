"""Dequantization of packed weights, for kernels that cannot multiply their codes."""

from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.kernels.layers import Linear
from tandem.engine.kernels.packed_weight import PackedWeight, Weight


def as_matrix(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return the weight as a tensor: a plain one unchanged, a packed one dequantized to `dtype`."""
    return weight.dequantized(dtype) if isinstance(weight, PackedWeight) else weight


def unpacked(linear: Linear, dtype: torch.dtype) -> Linear:
    """Return the same linear layer with a plain tensor as its weight."""
    return replace(linear, weight=as_matrix(linear.weight, dtype))
