"""Quantizes 16-bit weights by rounding to the nearest code while they are loaded."""

import torch
from torch import Tensor

from tandem.engine.config.quantization import Codes, Packing
from tandem.engine.kernels.packed_weight import CENTRE, PackedWeight, pack_nibbles

_LARGEST = {Codes.INT8: 127.5, Codes.INT4: 7.5, Codes.FLOAT8: torch.finfo(torch.float8_e4m3fn).max}
"""The code value to which a group's largest magnitude is scaled.

For integers it is half of their range, as in compressed-tensors.
"""


def rounded(weight: Tensor, packing: Packing) -> PackedWeight:
    """Return a weight [..., N, K] quantized by rounding; scales map a group's largest magnitude to `_LARGEST`.

    Only one matrix at a time is copied in float32.
    """
    if weight.dim() > 2:
        matrices = [rounded(matrix, packing) for matrix in weight]
        codes, scales = (
            torch.stack(parts) for parts in zip(*((one.codes, one.scales) for one in matrices), strict=True)
        )
        return PackedWeight(codes, scales, None, packing.group)
    rows, columns = weight.shape
    grouped = weight.to(torch.float32).reshape(rows, columns // packing.group, packing.group)
    scales = symmetric_scales(grouped, _LARGEST[packing.codes])
    values = (grouped / scales).reshape(weight.shape)
    if packing.codes is Codes.FLOAT8:
        codes = values.to(torch.float8_e4m3fn)
    elif packing.codes is Codes.INT8:
        codes = values.round().clamp(-128, 127).to(torch.int8)
    else:
        codes = pack_nibbles(values.round().clamp(-CENTRE, CENTRE - 1) + CENTRE)
    return PackedWeight(codes, scales.squeeze(-1), None, packing.group)


def symmetric_scales(groups: Tensor, reach: float) -> Tensor:
    """Return scales [..., 1] that map the largest magnitude of each group [..., columns] to `reach`.

    The scale of a group of zeros is 1.
    """
    largest = groups.abs().amax(-1, keepdim=True)
    # GPUs would multiply by the reciprocal of a scalar, whose last bit may change codes at the ends of the range; a
    # tensor is divided exactly.
    return torch.where(largest > 0, largest / torch.full_like(largest, reach), 1.0)
