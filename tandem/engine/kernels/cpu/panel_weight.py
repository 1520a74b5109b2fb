"""The form of packed weights on CPUs: panels of sixteen rows, stored in the order in which they are multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.kernels.cpu.ir import LANES
from tandem.engine.kernels.packed_weight import Float4Weight, PackedWeight, pack_nibbles, unpack_nibbles

UNIT = 4
"""Number of columns that one 32-bit lane of a product multiplies."""
WIDE_CENTRE = 128
"""The number that is added to 8-bit codes to make them unsigned."""
_PIECE = 1 << 22
"""Number of codes that are rearranged at a time, which bounds the temporary memory."""


@dataclass(frozen=True, slots=True)
class PanelWeight(PackedWeight):
    """A packed weight [..., N, K], rearranged for the CPU kernels into panels of 16 rows.

    N is rounded up to a multiple of 16 in all shapes; the added rows are zero. A unit is `UNIT` = 4 adjacent columns of
    a row.

    codes   8 bits: [..., N / 16, K / 4, 16, 4] int8; the last dimension is a unit. The sign bit is flipped, so that the
            byte, read as unsigned, is the code + 128.
            4 bits: [..., N / 16, K / 8, 16, 4] uint8; the last dimension has two adjacent units. Byte i has column i of
            the first unit in its low four bits, and column i of the second unit in its high four bits.
    scales  [..., N / 16, K / group, 16] float16; the scale of a group is the entry here times the row's factor. With
            one scale per row and no offsets: [..., N / 16, 0, 16], and `factors` has the scales.
    offsets like `scales`, or None as in `PackedWeight`. They apply to the original codes, not to codes + 128.
    factors [..., N / 16, 16] float32: the scales if `scales` is empty, else a power of two for each row, chosen so that
            the row's scales and offsets, divided by it, fit float16.
    """

    factors: Tensor
    outputs: int
    inputs: int

    @property
    def shape(self) -> torch.Size:
        """The weight's shape [..., N, K]."""
        return torch.Size([*self.factors.shape[:-2], self.outputs, self.inputs])

    def __len__(self) -> int:
        return self.shape[0]

    def parts(self) -> tuple[Tensor, ...]:
        """Return the tensors: those of `PackedWeight`, and the factors."""
        # A dataclass with slots is a new class, which the short form of super() does not know.
        return (*PackedWeight.parts(self), self.factors)

    def __getitem__(self, index: int | slice) -> PanelWeight:
        """Return a view of one weight of several stacked ones. Raises TypeError if the weight is not stacked."""
        if self.factors.dim() == 2:
            raise TypeError("Rows of panels have no view: see `rows`.")
        offsets = None if self.offsets is None else self.offsets[index]
        return PanelWeight(
            self.codes[index], self.scales[index], offsets, self.group, self.factors[index], self.outputs, self.inputs
        )

    def rows(self, index: Tensor) -> PackedWeight:
        """Return a copy of the rows whose numbers are in `index` [T] int64, in the layout of `PackedWeight`.

        The weight must not be stacked.
        """
        panel, lane = index // LANES, index % LANES
        held = self.codes[panel, :, lane]
        if self.bits == 4:
            codes = pack_nibbles(torch.stack((held & 15, held >> 4), dim=2).flatten(1))
        else:
            codes = held.flatten(1) ^ -128
        factors = self.factors[panel, lane, None]
        scales = factors if self.scales.shape[1] == 0 else self.scales[panel, :, lane] * factors
        offsets = None if self.offsets is None else self.offsets[panel, :, lane] * factors
        return PackedWeight(codes, scales, offsets, self.group)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [..., N, K] in `dtype`.

        Scales that were not float16 have been rounded to float16, relative to their row's factor.
        """
        if self.factors.dim() > 2:
            return torch.stack([self[index].dequantized(dtype) for index in range(len(self))])
        return self.rows(torch.arange(self.outputs)).dequantized(dtype)


def in_panels(weight: PackedWeight) -> PanelWeight:
    """Return a copy of a packed weight, rearranged into panels; stacked weights stay stacked.

    `multiplied_on_cpus` must be True for the weight. FP4 codes become int8 codes.
    """
    if len(weight.shape) > 2:
        return _stacked([in_panels(weight[index]) for index in range(len(weight))])
    if isinstance(weight, Float4Weight):
        weight = weight.as_int8()
    rows, columns = weight.shape
    scales = weight.scales.to(torch.float32)
    offsets = None if weight.offsets is None else weight.offsets.to(torch.float32)
    if weight.group == columns and offsets is None:
        factors, scales = scales[:, 0], scales[:, :0]
    else:
        largest = (scales if offsets is None else torch.maximum(scales.abs(), offsets.abs())).abs().amax(dim=1)
        factors = torch.ldexp(torch.ones(rows), torch.frexp(largest).exponent)
        scales = scales / factors[:, None]
    return PanelWeight(
        _codes_in_panels(weight.codes, columns),
        _by_panel(scales).half(),
        None if offsets is None else _by_panel(offsets / factors[:, None]).half(),
        weight.group,
        _by_panel(factors[:, None])[:, 0].contiguous(),
        rows,
        columns,
    )


def _stacked(weights: Sequence[PanelWeight]) -> PanelWeight:
    codes, scales, *offsets, factors = (
        torch.stack(parts) for parts in zip(*(weight.parts() for weight in weights), strict=True)
    )
    first = weights[0]
    return PanelWeight(
        codes, scales, offsets[0] if offsets else None, first.group, factors, first.outputs, first.inputs
    )


def _by_panel(numbers: Tensor) -> Tensor:
    """Rearrange [N, any] to [N / 16, any, 16], with zeros for rows from N on."""
    padded = _padded(numbers)
    return padded.view(len(padded) // LANES, LANES, numbers.shape[1]).transpose(1, 2).contiguous()


def _padded(numbers: Tensor) -> Tensor:
    missing = -len(numbers) % LANES
    return torch.cat((numbers, numbers.new_zeros(missing, *numbers.shape[1:]))) if missing else numbers


def _codes_in_panels(codes: Tensor, columns: int) -> Tensor:
    four_bit = codes.dtype == torch.uint8
    units = columns // (2 * UNIT if four_bit else UNIT)
    panels = -(-len(codes) // LANES)
    rearranged = torch.empty(panels, units, LANES, UNIT, dtype=codes.dtype)
    step = max(_PIECE // columns // LANES, 1)
    for first in range(0, panels, step):
        piece = _padded(codes[first * LANES : (first + step) * LANES])
        if four_bit:
            pairs = unpack_nibbles(piece).view(-1, LANES, units, 2, UNIT)
            packed = pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4
        else:
            packed = (piece ^ -128).view(-1, LANES, units, UNIT)
        rearranged[first : first + step] = packed.transpose(1, 2)
    return rearranged
