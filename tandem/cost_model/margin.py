"""Learns the margin: a ratio of observed to predicted step duration that few steps exceed."""

from dataclasses import dataclass

MARGIN_MIN, MARGIN_MAX = 1.05, 1.5
"""Minimum and maximum of the margin.

Delivery to the client adds some percent to each gap, even if steps take as long as predicted. If more than the maximum
is observed, something else uses the machine, and no margin would help.
"""
_OVER = 0.005
"""The fraction of steps that exceed the margin: half of what targets for the 99th percentile allow.

The other half is for differences between requests (docs/decisions/placement.md). In simulated loads, too large a margin
costs almost nothing, but with too small a margin one answer in six misses its target.
"""
_PACE = 4 * _OVER
"""A step above the margin raises it by `_PACE` · (1 - `_OVER`); another step lowers it by `_PACE` · `_OVER`."""


@dataclass(slots=True)
class LearnedMargin:
    """Learns the 99.5th percentile of observed ÷ predicted step durations; ITL targets are divided by it.

    Stochastic approximation (Robbins and Monro 1951): an observation moves `value` by a constant, however large it is.
    """

    value: float

    def observe(self, ratio: float, weight: float = 1.0) -> None:
        """Learn from an observed ÷ predicted duration, which counts as `weight` steps."""
        moved = self.value + weight * _PACE * ((1.0 - _OVER) if ratio > self.value else -_OVER)
        self.value = min(max(moved, MARGIN_MIN), MARGIN_MAX)
