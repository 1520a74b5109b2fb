"""Scaling of a product's inputs, undone exactly where the inputs are computed, so that the model stays the same.

Dividing an input by s, and multiplying the weight's column for it by s, changes nothing except the rounding error. The
division is folded into the norm before q, k, v and before gate, up; into the rows of v before attention's output
product; and into the rows of up before down.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.config.model import GroupedQueryAttention
from tandem.engine.quantizer.calibrated_layer import CalibratedLayer


@dataclass(frozen=True, slots=True)
class Fold:
    """A product whose K inputs can be scaled, and the tensors that are divided for it."""

    weight: Tensor
    """[N, K], modified in place."""
    divided: tuple[Tensor, ...]
    """Tensors [S] or [S, …], modified in place; S = K except for attention's output product."""
    dtype: torch.dtype
    """The dtype in which the divided tensors are stored if they are not quantized."""
    kv_heads: int = 1
    shared_by: int = 1
    """The number of attention heads that read the same values, and therefore share a scale."""

    def shared(self, inputs: Tensor) -> Tensor:
        """Return the largest of the values [K] that belong to each scale [S]."""
        return inputs.view(self.kv_heads, self.shared_by, -1).amax(1).flatten()

    def spread(self, scales: Tensor) -> Tensor:
        """Return the scale [K] of each input from scales [S]."""
        return scales.view(self.kv_heads, 1, -1).expand(-1, self.shared_by, -1).flatten()

    def apply(self, scales: Tensor) -> None:
        """Divide by scales [S], and multiply the weight's columns by the factors that the rounded division has."""
        vector = self.divided[0]
        if vector.dim() == 1:
            before = vector.clone()
            vector.copy_((vector / scales).to(self.dtype))
            scales = torch.where(vector == 0, 1.0, before / vector)
        else:
            for tensor in self.divided:
                tensor.div_(scales.view(-1, *[1] * (tensor.dim() - 1)))
        self.weight.mul_(self.spread(scales))


def folds(layer: CalibratedLayer, dtype: torch.dtype) -> Iterator[Fold]:
    """Yield the folds of a layer whose norms are stored in `dtype`; each product has one."""
    attention, feed_forward = layer.attention, layer.feed_forward
    (spec,) = layer.spec.layers
    assert isinstance(spec.attention, GroupedQueryAttention)
    shape = spec.attention.shape
    yield Fold(layer.qkv, (layer.weights.input_norm,), dtype)
    values = _rows(layer.qkv, attention.qkv_bias, shape.kv_heads * shape.head_dim)
    yield Fold(layer.output, values, dtype, shape.kv_heads, shape.heads // shape.kv_heads)
    yield Fold(layer.gate_up, (layer.weights.feed_forward_norm,), dtype)
    yield Fold(layer.down, _rows(layer.gate_up, feed_forward.gate_up_bias, layer.down.shape[1]), dtype)


def _rows(weight: Tensor, bias: Tensor | None, last: int) -> tuple[Tensor, ...]:
    """Return the last rows of a weight, and of its bias if it has one."""
    return (weight[-last:],) if bias is None else (weight[-last:], bias[-last:])
