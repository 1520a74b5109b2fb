"""AWQ (Lin et al., arXiv:2306.00978): scales up the weights of large inputs, so that rounding them loses less."""

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
    """Scale the inputs of a linear layer so that rounding its weight causes the least output error.

    The scales are the inputs' mean magnitudes, raised to the exponent that causes the least error.
    """
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
