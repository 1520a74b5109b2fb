"""Packed weights for kernels that have no product for them: dequantized to a tensor."""

from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.base import Experts, Linear
from engine.kernels.packed_weight import PackedWeight, Weight


def as_matrix(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Returns the weight as a tensor: one that is not packed as it is, another one dequantized to `dtype`."""
    return weight.dequantized(dtype) if isinstance(weight, PackedWeight) else weight


def unpacked(linear: Linear, dtype: torch.dtype) -> Linear:
    """Returns the same product with a weight that is not packed."""
    return replace(linear, weight=as_matrix(linear.weight, dtype))


def unpacked_experts(experts: Experts, dtype: torch.dtype) -> Experts:
    """Returns the same experts with weights that are not packed."""
    return replace(
        experts,
        gate_up=as_matrix(experts.gate_up, dtype),
        down=as_matrix(experts.down, dtype),
        shared_gate_up=None if experts.shared_gate_up is None else unpacked(experts.shared_gate_up, dtype),
        shared_down=None if experts.shared_down is None else unpacked(experts.shared_down, dtype),
    )
