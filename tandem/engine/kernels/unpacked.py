"""Packed weights for kernels that have no product for them: dequantized to a tensor."""

from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.kernels.layers import Linear
from tandem.engine.kernels.packed_weight import PackedWeight, Weight


def as_matrix(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Returns the weight as a tensor: one that is not packed as it is, another one dequantized to `dtype`."""
    return weight.dequantized(dtype) if isinstance(weight, PackedWeight) else weight


def unpacked(linear: Linear, dtype: torch.dtype) -> Linear:
    """Returns the same product with a weight that is not packed."""
    return replace(linear, weight=as_matrix(linear.weight, dtype))
