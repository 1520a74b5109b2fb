"""FP4 weights in the form that GPU kernels read: four scale bytes in a word, and the rest of each scale in its row.

A scale byte b stands for the bfloat16 number with bits (b << shift) + base. An E2M1 code, placed at the end of the
exponent and the start of the fraction of a bfloat16 number, is too small by a factor of 2 ** 126; scales contain this
factor, so one product gives the weight. What would not fit the range of bfloat16 is in the row's factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.kernels.packed_weight import (
    FLOAT4_TILE,
    Float4Weight,
    PackedWeight,
    float4_numbers,
    pack_nibbles,
    unpack_nibbles,
)

SHIFTS = {32: 7, 16: 4}
"""The shift of scale bytes by the size of groups: bytes are exponents (E8M0), or have 5 bits of exponent (E5M3)."""
BASES = {32: 0, 16: 235 << 7}
SCALES_A_WORD = 4
_CODE_EXPONENT = 126
_TOP_EXPONENT = 128
"""The largest E8M0 byte that still fits the range of bfloat16 with the factor 2 ** 126."""
_E5M3_EXPONENT = 8
"""The exponent that NVFP4's scales leave to the row's factor."""


@dataclass(frozen=True, slots=True)
class WordScaledWeight(Float4Weight):
    """An FP4 weight [..., N, K] with `scales` [..., N, ⌈K / group / 4⌉] int32; adjacent rows are adjacent in memory.

    A word has the scales of four groups in the order of the columns, the lowest byte first. If the last tile of codes
    has 32 columns, each of its scales is there twice: the halves of a tile are 32 columns apart.
    """

    def _at(self, index: int | slice | Tensor) -> WordScaledWeight:
        return WordScaledWeight(self.codes[index], self.scales[index], None, self.group, self.factors[index])

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [..., N, K] in `dtype`, computed in float32 and rounded once."""
        numbers = torch.unflatten(float4_numbers(unpack_nibbles(self.codes, FLOAT4_TILE)), -1, (-1, self.group))
        places = torch.arange(0, 32, 8, dtype=torch.int32, device=self.device)
        held = (self.scales[..., None] >> places & 255).flatten(-2)
        bits = ((held << SHIFTS[self.group]) + BASES[self.group]) << 16
        scales = torch.ldexp(bits.view(torch.float32), torch.tensor(-_CODE_EXPONENT, device=self.device))
        groups, columns = numbers.shape[-2], self.shape[-1]
        if columns % FLOAT4_TILE:
            whole = columns // FLOAT4_TILE * FLOAT4_TILE // self.group
            scales = torch.cat((scales[..., :whole], scales[..., whole : 2 * groups - whole : 2]), dim=-1)
        weight = numbers * (scales[..., :groups] * self.factors[..., None])[..., None]
        return weight.flatten(-2).to(dtype)


def word_scaled(weight: PackedWeight) -> WordScaledWeight:
    """Return the weight, or stacked weights, in the form that kernels read."""
    assert isinstance(weight, Float4Weight)
    codes = weight.codes
    if weight.scales.dtype == torch.float8_e8m0fnu:
        held, exponents = _exponent_bytes(weight.scales.view(torch.uint8).int())
    else:
        codes = _without_zero_groups(weight)
        held = _e5m3_bytes(weight.scales.float())
        exponents = torch.full_like(weight.factors, _E5M3_EXPONENT, dtype=torch.int32)
    columns, tile_groups = weight.shape[-1], FLOAT4_TILE // weight.group
    if columns % FLOAT4_TILE:
        whole = columns // FLOAT4_TILE * tile_groups
        held = torch.cat((held[..., :whole], held[..., whole:].repeat_interleave(2, dim=-1)), dim=-1)
    held = torch.nn.functional.pad(held, (0, -held.shape[-1] % SCALES_A_WORD))
    words = held.to(torch.uint8).view(torch.int32).transpose(-1, -2)
    # Not `contiguous`, which keeps the strides of a single word, of which kernels need that between words.
    by_word = torch.empty(words.shape, dtype=torch.int32, device=words.device).copy_(words)
    return WordScaledWeight(
        codes, by_word.transpose(-1, -2), None, weight.group, torch.ldexp(weight.factors, exponents)
    )


def _exponent_bytes(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bytes of E8M0 scales [..., G] int32, and the exponent [...] that each row's factor takes over."""
    above = (scales.amax(-1) - _TOP_EXPONENT).clamp(min=0)
    return (scales + _CODE_EXPONENT - above[..., None]).clamp(min=0), above


def _e5m3_bytes(scales: Tensor) -> Tensor:
    """Return the bytes of float32 numbers that float8_e4m3fn can represent and that are not negative; 0 for 0."""
    fraction, exponent = torch.frexp(scales)  # scales = fraction · 2 ** exponent, fraction in [0.5, 1)
    # With the implicit 1, the exponent of the smallest number, 2 ** -9, becomes 1.
    held = ((exponent - 1 + 10) << 3) + ((2 * fraction - 1) * 8).int()
    return torch.where(scales > 0, held, 0)


def _without_zero_groups(weight: Float4Weight) -> Tensor:
    """Return the codes, with 0 in groups whose scale is 0: no scale byte stands for 0."""
    zero = weight.scales.view(torch.uint8) == 0
    if not bool(zero.any()):
        return weight.codes
    codes = unpack_nibbles(weight.codes, FLOAT4_TILE)
    return pack_nibbles(codes.masked_fill(zero.repeat_interleave(weight.group, dim=-1), 0), FLOAT4_TILE)
