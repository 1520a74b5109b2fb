"""Scales the inputs of linear layers without changing the model's outputs.

If an input is divided by s, and the weight's column for this input is multiplied by s, only the rounding error of
quantization changes. The division is folded into the weights that compute the input: the norm before q, k, v and before
gate, up; the rows of v for attention's output projection; and the rows of up for down.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.config.model import GroupedQueryAttention
from tandem.engine.quantizer.calibrated_layer import CalibratedLayer


@dataclass(frozen=True, slots=True)
class Fold:
    """A linear layer whose K inputs can be scaled, and the tensors into which the division is folded."""

    weight: Tensor
    """The weight of the linear layer, [N, K]; modified in place."""
    divided: tuple[Tensor, ...]
    """The tensors that are divided in place, [S] or [S, …]: row s is divided by scale s.

    S is K, except for attention's output projection: query heads with the same KV head share scales (`shared_by`).
    """
    dtype: torch.dtype
    """The dtype in which `divided` is stored if it is not quantized."""
    kv_heads: int = 1
    shared_by: int = 1
    """The number of query heads that read the same KV head, and therefore share its scales."""

    def shared(self, inputs: Tensor) -> Tensor:
        """Return [S]: for each scale, the maximum of the values `inputs` [K] of the inputs that share the scale."""
        return inputs.view(self.kv_heads, self.shared_by, -1).amax(1).flatten()

    def spread(self, scales: Tensor) -> Tensor:
        """Return the scale of each input [K] from the scales [S]."""
        return scales.view(self.kv_heads, 1, -1).expand(-1, self.shared_by, -1).flatten()

    def apply(self, scales: Tensor) -> None:
        """Divide the tensors by the scales [S], and multiply the weight's columns to compensate.

        A norm is rounded to `dtype` after the division, so the columns are multiplied by the ratio of the norm's values
        before the division and after the rounding.
        """
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
    """Yield the fold of each linear layer of a decoder layer whose norms are stored in `dtype`."""
    attention, feed_forward = layer.attention, layer.feed_forward
    (spec,) = layer.spec.layers
    assert isinstance(spec.attention, GroupedQueryAttention)
    shape = spec.attention.shape
    before, between = layer.weights.input_norm, layer.weights.feed_forward_norm
    assert before is not None
    assert between is not None
    yield Fold(layer.qkv, (before,), dtype)
    values = _rows(layer.qkv, attention.qkv_bias, shape.qkv_rows[2])
    yield Fold(layer.output, values, dtype, shape.kv_heads, shape.heads // shape.kv_heads)
    yield Fold(layer.gate_up, (between,), dtype)
    yield Fold(layer.down, _rows(layer.gate_up, feed_forward.gate_up_bias, layer.down.shape[1]), dtype)


def _rows(weight: Tensor, bias: Tensor | None, last: int) -> tuple[Tensor, ...]:
    """Return the last `last` rows of a weight, and of its bias if it has one."""
    return (weight[-last:],) if bias is None else (weight[-last:], bias[-last:])
