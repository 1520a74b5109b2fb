"""SmoothQuant (Xiao et al., arXiv:2211.10438): scales large inputs down and their weights up."""

import torch

from tandem.engine.quantizer.calibration import InputStatistics
from tandem.engine.quantizer.folding import Fold

STRENGTH = 0.5
"""The α of the paper; at 0.5, inputs and weights get the same range."""


def smooth(fold: Fold, inputs: InputStatistics) -> None:
    """Divide input j by max|x_j|^α / max|w_j|^(1 - α), with the maxima over tokens and over outputs."""
    largest = fold.shared(inputs.largest)
    weights = fold.shared(fold.weight.abs().amax(0))
    scales = largest**STRENGTH / weights ** (1 - STRENGTH)
    fold.apply(torch.where((largest > 0) & (weights > 0), scales, 1.0))
