"""Rounding to nearest: each weight becomes the nearest value of its group's grid."""

import torch
from torch import Tensor

from tandem.engine.quantizer.codes import QuantizedWeight, fit_grid
from tandem.engine.quantizer.scheme import OutputScheme


def round_to_nearest(
    weight: Tensor, scheme: OutputScheme, group: int | None, scale_dtype: torch.dtype
) -> QuantizedWeight:
    """Return the codes of `weight` [N, K] float32; `group` is as in `fit_grid`."""
    grid = fit_grid(weight, scheme, group, scale_dtype)
    return QuantizedWeight(grid.codes(weight), grid)
