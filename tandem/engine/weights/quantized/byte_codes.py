"""Weights of one byte each: FP8 and INT8 of compressed-tensors, and FP8 of DeepSeek, Qwen3, ModelOpt and FBGEMM.

weight             [N, K] F8_E4M3 or I8; or, for a 2:4 sparse weight, two of each four codes:
compressed         [N, K / 2] F8_E4M3 or I8
bitmask            [N, K / 8] U8: one bit for each column, the lowest bit first, set if its code is stored
weight_scale       one, [N, 1], [N, G], or one for each block of rows and columns [⌈N / b⌉, ⌈K / g⌉];
                   weight_scale_inv has the same shapes, and is multiplied as well
weight_zero_point  I8, with the shape of weight_scale, if zero points are used

The scales of activations (`input_scale`) are ignored: activations are not quantized with stored scales.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.engine.config.quantization import Codes, WeightFormat, WeightScheme
from tandem.engine.weights.quantized.format import (
    FLOATS,
    Format,
    GroupedCodes,
    Shape,
    StoredTensor,
    group_count,
    unread,
)
from tandem.protocol.errors import ModelError

_UNREAD = unread(
    "input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "activation_scale", "weight_zero_point"
)


def _tensors(scheme: WeightScheme, rows: int, columns: int) -> tuple[StoredTensor, ...]:
    groups, blocks = group_count(scheme, columns), -(-rows // scheme.block_rows)
    shapes: tuple[Shape, ...] = ((blocks, groups),)
    if scheme.group is None:
        shapes = ((), (1,), (1, 1), (rows,), (rows, 1))
    kind = frozenset({"F8_E4M3" if scheme.codes is Codes.FLOAT8 else "I8"})
    tensors: tuple[StoredTensor, ...] = (StoredTensor("weight", ((rows, columns),), kind),)
    if scheme.sparse:
        mask = StoredTensor("bitmask", ((rows, -(-columns // 8)),), frozenset({"U8"}))
        tensors = (StoredTensor("compressed", ((rows, columns // 2),), kind), mask, *unread("shape"))
    tensors += (StoredTensor(_scale_name(scheme), shapes, FLOATS),)
    if not scheme.symmetric:
        tensors += (StoredTensor("weight_zero_point", shapes, frozenset({"I8"})),)
    return (*tensors, *(tensor for tensor in _UNREAD if tensor.name not in {stored.name for stored in tensors}))


def _read(scheme: WeightScheme, tensors: Mapping[str, Tensor], shape: Shape) -> GroupedCodes:
    rows, columns = shape
    scales = _matrix(tensors[_scale_name(scheme)], scheme, rows)
    offsets = None
    if not scheme.symmetric:
        offsets = -_matrix(tensors["weight_zero_point"], scheme, rows).to(torch.float32) * scales.to(torch.float32)
    codes = _with_zeros(tensors["compressed"], tensors["bitmask"], columns) if scheme.sparse else tensors["weight"]
    return GroupedCodes(codes, scales, offsets, scheme.group or columns)


def _with_zeros(compressed: Tensor, bitmask: Tensor, columns: int) -> Tensor:
    """Return the codes [N, K] of a 2:4 sparse weight.

    Raises ModelError if the mask does not have exactly half of the columns of each row.
    """
    bits = torch.arange(8, dtype=torch.uint8, device=bitmask.device)
    kept = (bitmask[..., None] >> bits & 1).flatten(-2)[:, :columns].bool()
    if not bool((kept.sum(-1) == compressed.shape[1]).all()):
        raise ModelError("has a bitmask without exactly half of the columns of each row")
    codes = torch.zeros(kept.shape, dtype=torch.uint8, device=kept.device)
    codes[kept] = compressed.view(torch.uint8).flatten()
    return codes.view(compressed.dtype)


def _matrix(values: Tensor, scheme: WeightScheme, rows: int) -> Tensor:
    """Return values [N, G] for all rows; the value of a block is repeated for each row of the block."""
    if scheme.group is None:
        return values.reshape(-1, 1).expand(rows, 1)
    return values.repeat_interleave(scheme.block_rows, dim=0)[:rows]


def _scale_name(scheme: WeightScheme) -> str:
    return "weight_scale_inv" if scheme.format is WeightFormat.FP8_BLOCKS else "weight_scale"


FORMAT = Format(_tensors, _read)
