"""Conversion of words of FP4 codes and of their scales to numbers in a kernel; `float4_weight` describes both."""

import triton
import triton.language as tl

from tandem.engine.kernels.packed.float4_weight import BASES, SCALES_A_WORD, SHIFTS
from tandem.engine.kernels.packed.triton_codes import WIDE
from tandem.engine.kernels.packed_weight import FLOAT4_TILE

_TILE_WORDS = tl.constexpr(8)
"""Number of words of codes of a tile, `FLOAT4_TILE` columns."""
_MX_SHIFT, _NV_SHIFT = tl.constexpr(SHIFTS[32]), tl.constexpr(SHIFTS[16])
_MX_BASE, _NV_BASE = tl.constexpr(BASES[32]), tl.constexpr(BASES[16])

# A shift to the left moves codes B and C to the place of A; the bits of D are gathered.
_PTX = tl.constexpr("""{
.reg .b32 a, b, c, d, e, f, zero;
shl.b32 b, $8, 3;
shl.b32 c, $8, 6;
shl.b32 d, $8, 1;
shr.u32 e, $8, 5;
shr.u32 f, $8, 4;
and.b32 a, $8, 0x81C081C0;
and.b32 b, b, 0x81C081C0;
and.b32 c, c, 0x81C081C0;
and.b32 d, d, 0x80008000;
lop3.b32 d, e, 0x01000100, d, 0xEA;
lop3.b32 d, f, 0x00C000C0, d, 0xEA;
mov.b32 zero, 0x80008000;
fma.rn.bf16x2 a, a, $9, zero;
fma.rn.bf16x2 b, b, $9, zero;
fma.rn.bf16x2 c, c, $10, zero;
fma.rn.bf16x2 d, d, $10, zero;
mov.b32 {$0, $1}, a;
mov.b32 {$2, $3}, b;
mov.b32 {$4, $5}, c;
mov.b32 {$6, $7}, d;
}""")


@triton.constexpr_function
def scale_words(columns: int, group: int) -> int:
    """Return the number of scale words of a row; 0 if `group` is 0, because its codes are not FP4."""
    return -(-columns // FLOAT4_TILE * FLOAT4_TILE // group // SCALES_A_WORD) if group else 0


@triton.jit
def load_scale_words(rows_at, start, word_stride, K: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """Load the scale words [rows, words] of the COLUMNS bytes of codes from byte `start` on."""
    WORDS: tl.constexpr = scale_words(K, GROUP)
    word = start // (2 * GROUP) + tl.arange(0, COLUMNS // (2 * GROUP))
    # Words after the last one belong to codes that are masked.
    return tl.load(rows_at[:, None] + tl.minimum(word, WORDS - 1)[None, :] * word_stride)


@triton.jit
def scale_bits(held, GROUP: tl.constexpr):
    """Return the bits of bfloat16 numbers for scale bytes, both int32."""
    if GROUP == 32:
        return (held << _MX_SHIFT) + _MX_BASE
    return (held << _NV_SHIFT) + _NV_BASE


@triton.jit
def float4_number(code, bits):
    """Return E2M1 codes, int32 from 0 to 15, times their scales with the bits `bits`, as float32."""
    number = ((code & 8) << 28) | ((code & 7) << 22)
    return number.to(tl.float32, bitcast=True) * (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def float4_as(words, scales, GROUP: tl.constexpr, dtype: tl.constexpr):
    """Convert words of codes, int32 [rows, words], to scaled weights in `dtype` → [rows, columns] in word order.

    `scales` are the words of `load_scale_words`. Columns come by tiles; within 16 columns, the order is that of
    `in_word_order`.
    """
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    SCALE_WORDS: tl.constexpr = scales.shape[1]
    TILES: tl.constexpr = WORDS // _TILE_WORDS
    # Half of a scale word's codes at a time. Calculated shifts would keep the compiler from loading the words of codes
    # in the layout in which they are multiplied.
    HALVES: tl.constexpr = 2 * SCALE_WORDS
    of_half = tl.reshape(tl.join(scales, scales >> (16 if GROUP == 32 else 8)), (ROWS, HALVES))
    of_word = tl.broadcast_to(of_half[:, :, None], (ROWS, HALVES, WORDS // HALVES))
    of_word = tl.reshape(of_word, (ROWS, WORDS))
    below = scale_bits(of_word & 255, GROUP)
    above = scale_bits((of_word >> (8 if GROUP == 32 else 16)) & 255, GROUP)
    if dtype != tl.bfloat16 or WIDE:
        lower, upper = _four(words, 0, below, dtype), _four(words, 1, above, dtype)
    else:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _PTX, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [words, below * 0x10001, above * 0x10001],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                   tl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip
        lower, upper = tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h))
    codes = tl.reshape(tl.join(lower, upper), (ROWS, TILES, _TILE_WORDS // 4, 4, 2, 2, 2))
    return tl.reshape(tl.permute(codes, (0, 1, 6, 2, 5, 3, 4)), (ROWS, 8 * WORDS))


@triton.jit
def word_code(half, second, part: tl.constexpr):
    """Return one of the codes A and C (`second` 0), or B and D, of half a word; `part` is 0 for A and B, else 1."""
    a, b = ((half >> 12) & 8) | ((half >> 6) & 7), ((half >> 9) & 8) | ((half >> 3) & 7)
    c, d = ((half >> 6) & 8) | (half & 7), ((half >> 11) & 12) | ((half >> 10) & 3)
    return tl.where(second == 0, c if part else a, d if part else b)


@triton.jit
def _four(words, part: tl.constexpr, bits, dtype: tl.constexpr):
    """Convert the lower (`part` 0) or the upper codes of each word → [rows, words, 2, 2]."""
    first = float4_number(word_code(words, 0, part), bits).to(dtype)
    second = float4_number(word_code(words >> 16, 0, part), bits).to(dtype)
    third = float4_number(word_code(words, 1, part), bits).to(dtype)
    fourth = float4_number(word_code(words >> 16, 1, part), bits).to(dtype)
    return tl.join(tl.join(first, second), tl.join(third, fourth))
