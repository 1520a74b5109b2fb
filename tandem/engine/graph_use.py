"""Counts how often steps use CUDA graphs, and how many padding tokens the graphs compute."""

from dataclasses import dataclass


@dataclass(slots=True)
class GraphUse:
    """Counts how steps use CUDA graphs; incremented by the thread that launches steps."""

    hits: int = 0
    """The number of steps that were run by a graph."""
    misses: int = 0
    """The number of steps for which no graph fits; all steps on a device without graphs."""
    padded_tokens: int = 0
    """The number of padding tokens that graphs computed in addition to the tokens of the steps."""
