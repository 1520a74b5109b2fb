"""The offsets of a state layer's inputs in its projections, and the rows that a launch computes."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from tandem.engine.config.state_layers import GatedDeltaNet, KimiDeltaAttention, Mamba2, ShortConvolution, StateLayer


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Adjacent rows of a step that one launch computes. All rows before them have one token each."""

    first: int
    """The number of the first row, and of its first token in the step."""
    rows: int
    tokens: int
    """The maximum number of tokens of a row; 1 = every row has exactly one token."""


@dataclass(frozen=True, slots=True)
class Projections:
    """Offsets in a row of the input projections, which has sum(spec.projected) elements.

    The channels of the convolution are ordered by part, and within a part by head of the state: each head has
    `parts[i]` channels in part i, 0 if there is no such part.
    """

    parts: tuple[int, int, int]
    convolved: int
    """The offset of the first channel of the convolution."""
    gate: int
    """The offset of the output gate."""
    step: int = 0
    """The offset of the step sizes of a delta rule, one for each value head."""
    decay: int = 0
    """The offset of dt, one for each head of values; in Kimi Delta Attention, for each key channel of a head."""


@lru_cache
def projections_of(spec: StateLayer) -> Projections:
    """Return the offsets for layers with this spec."""
    offsets = list(accumulate(spec.projected, initial=0))
    if isinstance(spec, ShortConvolution):
        return Projections((spec.convolved[0], 0, 0), convolved=0, gate=offsets[1])
    first, second, third = spec.convolved
    if isinstance(spec, GatedDeltaNet | KimiDeltaAttention):
        return Projections((first, second, third), convolved=0, gate=offsets[3], step=offsets[4], decay=offsets[5])
    assert isinstance(spec, Mamba2)
    return Projections((first, second, third), convolved=offsets[1], gate=0, decay=offsets[4])
