"""The operands of products of 8-bit weights and 8-bit inputs."""

from dataclasses import dataclass

from torch import Tensor

from tandem.engine.kernels.packed_weight import PackedWeight

BLOCK = 128
"""Size of the library's blocks: a weight has a scale per BLOCK rows and BLOCK columns, an input per BLOCK columns."""
ROW_TILE = 256
"""Quantized inputs have memory for a multiple of this number of tokens, so that no product reads outside of it."""


@dataclass(frozen=True, slots=True)
class ScaledWeight(PackedWeight):
    """A weight [..., N, K] of 8-bit codes, for products with inputs of 8-bit codes.

    block_scales  [⌈K / BLOCK / 4⌉ · 4, N / BLOCK] float32, column-major: one scale per block, in the form that the
                  library reads; None = each row has a single scale, the library cannot multiply the weight in blocks,
                  or weights are stacked
    """

    block_scales: Tensor | None


@dataclass(frozen=True, slots=True)
class QuantizedInput:
    """The input of a product as 8-bit codes, token by token: value = code · scale.

    codes   [rows, K] of the weight's dtype; rows from `tokens` on, up to a multiple of `ROW_TILE`, are undefined
    scales  [groups, rows] float32
    totals  [K / group of the weight, rows] float32, the sum of the codes of each group; None for weights of 8 bits
    """

    codes: Tensor
    scales: Tensor
    tokens: int
    totals: Tensor | None = None
