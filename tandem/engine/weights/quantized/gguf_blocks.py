"""GGUF blocks: the bytes of a row as they are in the file, `weight` U8 [N, K / elements · bytes].

type  elements  bytes  contents of a block
Q8_0        32     34  d f16; 32 codes i8: weight = d · code
Q4_0        32     18  d f16; 16 bytes, elements 0 to 15 in the lower halves: d · (code - 8)
Q4_1        32     20  d f16; m f16; 16 bytes likewise: d · code + m
Q4_K       256    144  d f16; dmin f16; 8 scales and 8 minima of 6 bits in 12 bytes; 4 times 32 bytes, the lower halves
                       first: d · scale · code - dmin · minimum
MXFP4       32     17  scale E8M0; 16 bytes, elements 0 to 15 in the lower halves: scale · E2M1(code)
Q6_K       256    210  128 bytes of lower and 64 of upper bits; 16 scales i8; d f16: d · scale · (code - 32)

N is the number of rows, B the number of blocks in a row.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tandem.engine.config.quantization import WeightFormat, WeightScheme
from tandem.engine.weights.quantized.float4_codes import float4
from tandem.engine.weights.quantized.format import Format, GroupedCodes, Shape, StoredTensor
from tandem.protocol.errors import ModelError

BLOCKS = {
    WeightFormat.Q8_0: (32, 34),
    WeightFormat.Q4_0: (32, 18),
    WeightFormat.Q4_1: (32, 20),
    WeightFormat.Q4_K: (256, 144),
    WeightFormat.Q6_K: (256, 210),
    WeightFormat.MXFP4_BLOCKS: (32, 17),
}
"""The numbers of elements and of bytes in a block of each format."""

Parts = tuple[Tensor, Tensor, Tensor | None]
"""The parts of blocks: codes [N, B, elements], scales [N, B, groups], and offsets or None."""


def _tensors(scheme: WeightScheme, rows: int, columns: int) -> tuple[StoredTensor, ...]:
    elements, size = BLOCKS[scheme.format]
    if columns % elements:
        raise ModelError(f"{columns} columns are no whole blocks of {elements} elements of {scheme.format}")
    return (StoredTensor("weight", ((rows, -(-columns // elements) * size),), frozenset({"U8"})),)


def _read(scheme: WeightScheme, tensors: Mapping[str, Tensor], shape: Shape) -> GroupedCodes:
    blocks = tensors["weight"].view(shape[0], -1, BLOCKS[scheme.format][1])
    assert scheme.group is not None
    if scheme.format is WeightFormat.MXFP4_BLOCKS:
        return float4(_halves(blocks[..., 1:]).flatten(1), blocks[..., 0], scheme.group)
    codes, scales, offsets = _READERS[scheme.format](blocks)
    return GroupedCodes(
        codes.flatten(1), scales.flatten(1), None if offsets is None else offsets.flatten(1), scheme.group
    )


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0), None


def _q4_0(blocks: Tensor) -> Parts:
    return _halves(blocks[..., 2:]), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    return _halves(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: Tensor) -> Parts:
    packed = blocks[..., 4:16]
    first, second, mixed = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, (mixed & 15) | (first >> 6 << 4)), dim=-1).to(torch.float32)
    minima = torch.cat((second & 63, (mixed >> 4) | (second >> 6 << 4)), dim=-1).to(torch.float32)
    codes = _halves(_split(blocks[..., 16:], 4, 32)).flatten(-2)
    return codes, _half(blocks, 0).float() * scales, -_half(blocks, 2).float() * minima


def _q6_k(blocks: Tensor) -> Parts:
    lower = _split(_halves(_split(blocks[..., :128], 2, 64)), 4, 32)
    upper = _split(blocks[..., 128:192], 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)[:, None]
    codes = (lower | ((upper >> shifts) & 3) << 4).flatten(-3).view(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).to(torch.float32)
    return codes, _half(blocks, 208).float() * scales, None


def _split(values: Tensor, *shape: int) -> Tensor:
    """Return the values with their last dimension split into `shape`."""
    return values.reshape(*values.shape[:-1], *shape)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 number at byte `start` of each block: [N, B, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _halves(pairs: Tensor) -> Tensor:
    """Return the 4-bit codes [..., 2 · bytes] in bytes: first the lower halves of all bytes, then the upper halves."""
    return torch.cat((pairs & 15, pairs >> 4), dim=-1)


_READERS: dict[WeightFormat, Callable[[Tensor], Parts]] = {
    WeightFormat.Q8_0: _q8_0,
    WeightFormat.Q4_0: _q4_0,
    WeightFormat.Q4_1: _q4_1,
    WeightFormat.Q4_K: _q4_k,
    WeightFormat.Q6_K: _q6_k,
}
FORMAT = Format(_tensors, _read)
