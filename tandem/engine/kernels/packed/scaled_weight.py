"""The operands of products whose weights and inputs both have 8 bits."""

from dataclasses import dataclass

from torch import Tensor

from tandem.engine.kernels.packed_weight import PackedWeight

BLOCK = 128
"""In the library's product: rows and columns of a block that shares a scale, and columns of a group of the input."""
ROW_TILE = 256
"""The memory of inputs holds multiples of this number of tokens, for every tile and for what a library reads."""


@dataclass(frozen=True, slots=True)
class ScaledWeight(PackedWeight):
    """A weight [N, K] of 8-bit codes, for inputs of 8-bit codes.

    block_scales  [⌈K / BLOCK / 4⌉ · 4, N / BLOCK] float32, column-major: the scales in the form that the library reads,
                  one for all rows of a block; None = there is one scale per row, or the library has no such product
    """

    block_scales: Tensor | None


@dataclass(frozen=True, slots=True)
class QuantizedInput:
    """Tokens as codes: value = code · scale.

    codes   [rows, K] of the weight's dtype; rows from `tokens` on, up to a multiple of `ROW_TILE`, are undefined
    scales  [groups, rows] float32
    """

    codes: Tensor
    scales: Tensor
    tokens: int
