"""FP4 weights in the form that GPU kernels read: four scale bytes in a word, and the rest of each scale in its row.

A scale byte b stands for the bfloat16 number with bits (b << shift) + base. An E2M1 code, placed at the end of the
exponent and the start of the fraction of a bfloat16 number, is too small by a factor of 2 ** 126; scales contain this
factor, so one product gives the weight. What would not fit the range of bfloat16 is in the row's factor.

The eight codes of a word are placed so that few instructions move two of them at a time to bits 15 and 8 to 6 of each
half of a register. Codes A, B, C and D of a half of the word (of its two lower and its two upper codes) have the bits

    15 14 13 12 11 10 9 8 7 6 5 4 3 2 1 0
    A  D  D  B  D  D  C A A A B B B C C C

of which the first of each is the sign. The columns of A are those of the lower codes of bytes 0 and 1, of B of bytes 2
and 3; those of C and D are likewise of the upper codes.
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
_MATRIX = 2
_TOP_EXPONENT = 128
"""The largest E8M0 byte that still fits the range of bfloat16 with the factor 2 ** 126."""
_E5M3_EXPONENT = 8
"""The exponent that NVFP4's scales leave to the row's factor."""


@dataclass(frozen=True, slots=True)
class WordScaledWeight(Float4Weight):
    """An FP4 weight [..., N, K] with codes in the order above.

    scales  [..., N, ⌈K / group / 4⌉] int32; adjacent rows are adjacent in memory

    A word has the scales of four groups in the order of the columns, the lowest byte first. If the last tile of codes
    has 32 columns, each of its scales is there twice: the halves of a tile are 32 columns apart.
    """

    def _at(self, index: int | slice | Tensor) -> WordScaledWeight:
        return WordScaledWeight(self.codes[index], self.scales[index], None, self.group, self.factors[index])

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [..., N, K] in `dtype`, computed in float32 and rounded once."""
        codes = unpack_nibbles(_in_byte_order(self.codes), FLOAT4_TILE)
        numbers = torch.unflatten(float4_numbers(codes), -1, (-1, self.group))
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
    codes = _in_word_order(codes) if codes.dim() == _MATRIX else torch.stack([_in_word_order(one) for one in codes])
    factors = torch.ldexp(weight.factors, exponents)
    return WordScaledWeight(codes, by_word.transpose(-1, -2), None, weight.group, factors)


def _in_word_order(codes: Tensor) -> Tensor:
    """Return codes [N, K / 2], two per byte, with the bits of each word in the order in which kernels read them."""
    held = codes.view(torch.int32)
    words = torch.zeros_like(held)
    for half in (0, 1):
        # The lower and the upper codes of byte `half`, then those of byte `half` + 2.
        a, c, b, d = (held >> shift & 15 for byte in (half, half + 2) for shift in (8 * byte, 8 * byte + 4))
        placed = (a & 8) << 12 | (a & 7) << 6 | (b & 8) << 9 | (b & 7) << 3 | (c & 8) << 6 | (c & 7)
        words |= (placed | (d & 12) << 11 | (d & 3) << 10) << 16 * half
    return words.view(torch.uint8)


def _in_byte_order(codes: Tensor) -> Tensor:
    """Revert `_in_word_order`."""
    words = codes.view(torch.int32)
    held = torch.zeros_like(words)
    for half in (0, 1):
        bits = words >> 16 * half & 0xFFFF
        a, b = bits >> 12 & 8 | bits >> 6 & 7, bits >> 9 & 8 | bits >> 3 & 7
        c, d = bits >> 6 & 8 | bits & 7, bits >> 11 & 12 | bits >> 10 & 3
        held |= (a | c << 4) << 8 * half | (b | d << 4) << 8 * half + 16
    return held.view(torch.uint8)


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
