"""A weight of 8-bit or 4-bit codes with scales, the form into which all quantized formats are repacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

TILE = 128
"""Number of columns whose 4-bit codes are packed together."""
CENTRE = 8
"""The 4-bit code that stands for zero in weights without offsets."""
FLOAT4_TILE = 64
"""Number of columns whose FP4 codes are packed together."""
FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of E2M1 without their sign, by their codes 0 to 7; codes 8 to 15 are their negatives."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [..., N, K]: weight[n, k] = codes[n, k] · scales[n, k // group] + offsets[n, k // group].

    codes   [..., N, K] int8 or float8_e4m3fn; or [..., N, K / 2] uint8 with two 4-bit codes of 0 to 15 per byte. 4-bit
            codes are planar: columns come in tiles of `TILE`, of which the last may be shorter, and byte j of a tile of
            c columns has column j in its lower half and column c / 2 + j in its upper half.
    scales  [..., N, K / group], of any floating-point dtype
    offsets likewise; None = zero for 8-bit codes, and -`CENTRE` · scales for 4-bit codes
    group   columns that share a scale; it divides K, and K itself means one scale per row

    With `quantized_inputs`, products also quantize their inputs, to codes of the weight's dtype with a scale for each
    token and group; then the weight has no offsets.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    group: int
    quantized_inputs: bool = field(default=False, kw_only=True)

    @property
    def bits(self) -> int:
        """Number of bits of a code: 8 or 4."""
        return 4 if self.codes.dtype == torch.uint8 else 8

    @property
    def shape(self) -> torch.Size:
        """The weight's shape [..., N, K]."""
        *outer, columns = self.codes.shape
        return torch.Size([*outer, columns * 8 // self.bits])

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Total size of all tensors in bytes."""
        return sum(part.nbytes for part in self.parts())

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int | slice) -> PackedWeight:
        """Return a view of some rows, or of one weight of several stacked ones."""
        return self._at(index)

    def rows(self, index: Tensor) -> PackedWeight:
        """Return a copy of the rows whose numbers are in `index` [T] int64."""
        return self._at(index)

    def _at(self, index: int | slice | Tensor) -> PackedWeight:
        offsets = None if self.offsets is None else self.offsets[index]
        parts = self.codes[index], self.scales[index], offsets, self.group
        return PackedWeight(*parts, quantized_inputs=self.quantized_inputs)

    def split_with_sizes(self, sizes: Sequence[int]) -> tuple[PackedWeight, ...]:
        """Return consecutive views of `sizes` rows each, as `Tensor.split_with_sizes` does."""
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        return tuple(self[end - size : end] for size, end in zip(sizes, ends, strict=True))

    def chunk(self, chunks: int) -> tuple[PackedWeight, ...]:
        """Return views of `chunks` equal parts of the rows; `chunks` must divide the number of rows."""
        return self.split_with_sizes([len(self) // chunks] * chunks)

    def parts(self) -> tuple[Tensor, ...]:
        """Return the tensors: codes, scales, and offsets if there are any."""
        return (self.codes, self.scales) if self.offsets is None else (self.codes, self.scales, self.offsets)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [..., N, K] in `dtype`, computed in float32 and rounded once."""
        codes = unpack_nibbles(self.codes) if self.bits == 4 else self.codes
        *outer, columns = codes.shape
        grouped = codes.to(torch.float32).view(*outer, columns // self.group, self.group)
        scales = self.scales.to(torch.float32)[..., None]
        if self.offsets is not None:
            weight = grouped * scales + self.offsets.to(torch.float32)[..., None]
        else:
            weight = (grouped - CENTRE if self.bits == 4 else grouped) * scales
        return weight.reshape(*outer, columns).to(dtype)


@dataclass(frozen=True, slots=True)
class Float4Weight(PackedWeight):
    """A weight [..., N, K] of FP4 codes: weight[n, k] = E2M1(codes[n, k]) · scales[n, k // group] · factors[n].

    codes   [..., N, K / 2] uint8, planar as in `PackedWeight`, but in tiles of `FLOAT4_TILE` columns
    scales  [..., N, K / group] float8_e8m0fnu (MXFP4, groups of 32) or float8_e4m3fn (NVFP4, groups of 16)
    offsets None
    factors [..., N] float32

    An E2M1 number times its scale is exact in bfloat16, and twice an E2M1 number is an integer.
    """

    factors: Tensor

    def parts(self) -> tuple[Tensor, ...]:
        """Return the tensors: codes, scales and factors."""
        return self.codes, self.scales, self.factors

    def _at(self, index: int | slice | Tensor) -> Float4Weight:
        return Float4Weight(self.codes[index], self.scales[index], None, self.group, self.factors[index])

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [..., N, K] in `dtype`, computed in float32 and rounded once."""
        weight = float4_numbers(unpack_nibbles(self.codes, FLOAT4_TILE))
        scales = self.scales.to(torch.float32) * self.factors[..., None]
        return (torch.unflatten(weight, -1, (-1, self.group)) * scales[..., None]).flatten(-2).to(dtype)

    def as_int8(self) -> PackedWeight:
        """Return the same weight with 8-bit codes, and scales in float32."""
        codes = (2 * float4_numbers(unpack_nibbles(self.codes, FLOAT4_TILE))).to(torch.int8)
        return PackedWeight(codes, self.scales.to(torch.float32) * self.factors[..., None] / 2, None, self.group)


Weight = Tensor | PackedWeight
"""A plain tensor, or a packed weight."""


def float4_numbers(codes: Tensor) -> Tensor:
    """Return the float32 numbers of E2M1 codes, uint8 with values 0 to 15."""
    numbers = (*FLOAT4_VALUES, *(-value for value in FLOAT4_VALUES))
    return torch.tensor(numbers, dtype=torch.float32, device=codes.device)[codes.int()]


def pack_nibbles(codes: Tensor, tile: int = TILE) -> Tensor:
    """Pack codes [..., K] of 0 to 15, K even, into the layout of `PackedWeight.codes` → [..., K / 2] uint8."""

    def pack(tiles: Tensor) -> Tensor:
        lower, upper = tiles.tensor_split(2, dim=-1)
        return upper << 4 | lower

    return _by_tile(codes.to(torch.uint8), tile, pack)


def unpack_nibbles(packed: Tensor, tile: int = TILE) -> Tensor:
    """Return the codes [..., K] uint8 that `pack_nibbles` packed."""
    return _by_tile(packed, tile // 2, lambda tiles: torch.cat((tiles & 15, tiles >> 4), dim=-1))


def _by_tile(values: Tensor, tile: int, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """Convert the whole tiles [..., tiles, tile] of the last dimension together, then the shorter tile at its end."""
    *outer, columns = values.shape
    whole = columns // tile * tile
    parts = []
    if whole:
        parts.append(convert(values[..., :whole].reshape(*outer, -1, tile)).flatten(-2))
    if whole < columns:
        parts.append(convert(values[..., whole:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
