"""Learns the ratio of observed to predicted step durations that is rarely exceeded."""

from dataclasses import dataclass

MARGIN_MIN, MARGIN_MAX = 1.05, 1.5
"""The bounds of a margin.

Delivery to the client adds some percent to each gap, even if steps take as long as predicted. Beyond the upper bound
something else uses the machine, and no margin would help.
"""
_OVER = 0.005
"""The share of observations that exceed the margin: half of what targets at the 99th percentile allow.

The other half is for differences between requests (docs/decisions/placement.md). In simulated loads, a margin that is
too large costs next to nothing, and one that is too small costs one answer in six.
"""
_PACE = 4 * _OVER
"""The amount by which a single larger observation raises the margin."""


@dataclass(slots=True)
class LearnedMargin:
    """Learns the 99.5th percentile of observed ÷ predicted, by which ITL targets are divided.

    Stochastic approximation (Robbins and Monro 1951): an observation moves `value` by a constant, however large it is.
    """

    value: float

    def observe(self, ratio: float, weight: float = 1.0) -> None:
        """Add an observation of observed ÷ predicted that counts as `weight` steps."""
        moved = self.value + weight * _PACE * ((1.0 - _OVER) if ratio > self.value else -_OVER)
        self.value = min(max(moved, MARGIN_MIN), MARGIN_MAX)
