"""How much of the work graphs do, and how much they do for nobody."""

from dataclasses import dataclass


@dataclass(slots=True)
class GraphUse:
    """Counted by the thread that launches steps."""

    hits: int = 0
    """Steps that a graph computed."""
    misses: int = 0
    """Steps that none fitted; all of them on a device without graphs."""
    padded_tokens: int = 0
    """Tokens that graphs computed beside those of their steps."""
