"""Counters of how often steps use CUDA graphs, and of their padding."""

from dataclasses import dataclass


@dataclass(slots=True)
class GraphUse:
    """The counters, incremented by the thread that launches steps."""

    hits: int = 0
    """The number of steps that a graph computed."""
    misses: int = 0
    """The number of steps without a fitting graph; on a device without graphs, all steps."""
    padded_tokens: int = 0
    """The number of padding tokens that graphs computed in addition to their steps' tokens."""
