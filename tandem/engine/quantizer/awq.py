"""AWQ (Lin et al., arXiv:2306.00978): weights of large inputs are scaled up, so that rounding changes them less."""

import torch
from torch import Tensor

from tandem.engine.quantizer.calibration import InputStatistics
from tandem.engine.quantizer.folding import Fold
from tandem.engine.quantizer.rtn import round_to_nearest
from tandem.engine.quantizer.scheme import OutputScheme

_EXPONENTS = 20
"""The number of exponents that are tried, in equal steps from 0 (no scaling) to below 1, as in the paper."""


def scale_for_activations(
    fold: Fold, inputs: InputStatistics, scheme: OutputScheme, group: int | None, scale_dtype: torch.dtype
) -> None:
    """Scale the inputs by the power of their mean magnitude that minimizes the output error of the rounded product."""
    sizes = fold.shared(inputs.mean).clamp(min=1e-4)

    def scales_of(step: int) -> Tensor:
        scales = sizes ** (step / _EXPONENTS)
        return scales / (scales.max() * scales.min()).sqrt()

    def error(step: int) -> float:
        spread = fold.spread(scales_of(step))
        rounded = round_to_nearest(fold.weight * spread, scheme, group, scale_dtype).values() / spread
        return inputs.error(rounded - fold.weight).item()

    best = min(range(_EXPONENTS), key=error)
    if best > 0:
        fold.apply(scales_of(best))
