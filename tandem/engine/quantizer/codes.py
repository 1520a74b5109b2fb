"""Codes, scales and zero points of a quantized weight, and rounding to codes.

A weight is [N, K]: N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.quantizer.scheme import OutputScheme
from tandem.engine.weights.quantized.rounding import symmetric_scales


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that a quantized weight can have: (code - zero) · scale, with one scale per row and column group."""

    scheme: OutputScheme
    scales: Tensor
    """[N, K / group] float32, with values that are exact in the dtype in which scales are written."""
    zeros: Tensor | None
    """[N, K / group]: the zero points, whole numbers; None = all are zero."""
    group: int

    def codes(self, weight: Tensor, first: int = 0) -> Tensor:
        """Return the nearest codes of `weight` [N, columns] float32, as float32; its first column has number `first`.

        Float codes are rounded as in E4M3: to nearest, ties to even. Without quantization the codes are the weights.
        """
        if not self.scheme.quantizes:
            return weight
        scales, zeros = self._of_columns(first, weight.shape[1])
        scaled = weight / scales
        if self.scheme.kind == "float":
            limit = self.scheme.largest
            return scaled.clamp(-limit, limit).to(torch.float8_e4m3fn).float()
        shifted = scaled.round() if zeros is None else scaled.round() + zeros
        return shifted.clamp(self.scheme.lowest, self.scheme.largest)

    def values(self, codes: Tensor, first: int = 0) -> Tensor:
        """Return the weight values [N, columns] float32 of codes; the first column has number `first`."""
        scales, zeros = self._of_columns(first, codes.shape[1])
        return (codes if zeros is None else codes - zeros) * scales

    def _of_columns(self, first: int, columns: int) -> tuple[Tensor, Tensor | None]:
        groups = torch.arange(first, first + columns, device=self.scales.device) // self.group
        return self.scales[:, groups], None if self.zeros is None else self.zeros[:, groups]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight: codes [N, K], as float32 with whole or E4M3 values, and their grid."""

    codes: Tensor
    grid: Grid

    def values(self) -> Tensor:
        """Return the weight [N, K] float32 that the codes represent."""
        return self.grid.values(self.codes)

    def rows(self, first: int, count: int) -> QuantizedWeight:
        """Return `count` rows of the weight, starting at row `first`, as views."""
        zeros = None if self.grid.zeros is None else self.grid.zeros[first : first + count]
        scales = self.grid.scales[first : first + count]
        return QuantizedWeight(
            self.codes[first : first + count], Grid(self.grid.scheme, scales, zeros, self.grid.group)
        )


def fit_grid(weight: Tensor, scheme: OutputScheme, group: int | None, dtype: torch.dtype) -> Grid:
    """Return the grid that covers each group's range of weights.

    Scales are rounded to `dtype`, in which they are written. `group` is the number of columns in a group; None = all.
    """
    if not scheme.quantizes:
        return Grid(scheme, torch.ones_like(weight[:, :1]), None, weight.shape[1])
    width = weight.shape[1] if group is None else group
    grouped = weight.view(len(weight), -1, width)
    if scheme.symmetric:
        return Grid(scheme, _rounded(symmetric_scales(grouped, scheme.reach).squeeze(-1), dtype), None, width)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = _rounded((high - low) / (scheme.largest - scheme.lowest), dtype)
    zeros = (scheme.lowest - low / scales).round().clamp(scheme.lowest, scheme.largest)
    return Grid(scheme, scales, zeros, width)


def _rounded(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales rounded to `dtype`; a scale of 0, as in a group of zeros, becomes 1."""
    stored = scales.to(dtype).float()
    return torch.where(stored > 0, stored, 1.0)
