"""Counters of the use of CUDA graphs, and of their padding."""

from dataclasses import dataclass


@dataclass(slots=True)
class GraphUse:
    """Counters that the thread that launches steps increments."""

    hits: int = 0
    """Steps that a graph computed."""
    misses: int = 0
    """Steps without a fitting graph; on a device without graphs, all steps."""
    padded_tokens: int = 0
    """Padding tokens that graphs computed in addition to those of their steps."""
