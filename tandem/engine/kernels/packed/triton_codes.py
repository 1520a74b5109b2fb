"""Conversion of a packed weight's codes to numbers in a kernel: single codes, or words of four bytes.

For the tensor cores, thread t holds columns 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16 columns. Here it reads the codes
of columns 4t to 4t + 3 instead, which are one word, and `in_word_order` reorders the input in the same way, so that the
sums are the same.
"""

import triton
import triton.language as tl

from tandem.engine.kernels.triton_launch import INTERPRETED

TILE = tl.constexpr(128)
CENTRE = tl.constexpr(8)
"""The constants `packed_weight.TILE` and `packed_weight.CENTRE` for kernels."""
WIDE = tl.constexpr(INTERPRETED)
"""True in Triton's interpreter, which has no PTX; there, float32 numbers are subtracted instead of bfloat16."""

# In PTX two numbers share a register. As bits of bfloat16, 0x4300 | n is 128 + n for n < 128, and 0x4380 is 256.
_INT8_PTX = tl.constexpr("""{
.reg .b32 lower, upper, sign, other, minus;
prmt.b32 lower, $4, 0x43434343, 0x5140;
prmt.b32 upper, $4, 0x43434343, 0x5342;
and.b32 sign, lower, 0xFF80FF80;
and.b32 other, upper, 0xFF80FF80;
and.b32 lower, lower, 0xFF7FFF7F;
and.b32 upper, upper, 0xFF7FFF7F;
mov.b32 minus, 0xBF80BF80;
fma.rn.bf16x2 lower, sign, minus, lower;
fma.rn.bf16x2 upper, other, minus, upper;
mov.b32 {$0, $1}, lower;
mov.b32 {$2, $3}, upper;
}""")
# Read as bits of bfloat16, the exponent and fraction of float8_e4m3fn are too small by a factor of 2 ** 120.
_FP8_PTX = tl.constexpr("""{
.reg .b32 lower, upper, sign, other, factor, zero;
prmt.b32 lower, $4, 0, 0x1404;
prmt.b32 upper, $4, 0, 0x3424;
and.b32 sign, lower, 0x80008000;
and.b32 other, upper, 0x80008000;
shr.u32 lower, lower, 4;
shr.u32 upper, upper, 4;
lop3.b32 lower, lower, 0x07F007F0, sign, 0xEA;
lop3.b32 upper, upper, 0x07F007F0, other, 0xEA;
mov.b32 factor, 0x7B807B80;
mov.b32 zero, 0x80008000;
fma.rn.bf16x2 lower, lower, factor, zero;
fma.rn.bf16x2 upper, upper, factor, zero;
mov.b32 {$0, $1}, lower;
mov.b32 {$2, $3}, upper;
}""")
_INT4_PTX = tl.constexpr("""{
.reg .b32 a, b, c, d, one, minus;
prmt.b32 a, $8, 0, 0x4140;
prmt.b32 b, $8, 0, 0x4342;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
mov.b32 one, 0x3F803F80;
mov.b32 minus, 0xC308C308;
fma.rn.bf16x2 a, a, one, minus;
fma.rn.bf16x2 b, b, one, minus;
fma.rn.bf16x2 c, c, one, minus;
fma.rn.bf16x2 d, d, one, minus;
mov.b32 {$0, $1}, a;
mov.b32 {$2, $3}, b;
mov.b32 {$4, $5}, c;
mov.b32 {$6, $7}, d;
}""")


@triton.jit
def _minus(a, b):
    """Return a - b of bfloat16 numbers whose difference is exact."""
    if WIDE:
        return (a.to(tl.float32) - b.to(tl.float32)).to(tl.bfloat16)
    return a - b


@triton.jit
def bytes_as(held, FP8: tl.constexpr, dtype: tl.constexpr):
    """Convert 8-bit codes to `dtype`; they are uint8 with the bits of int8, or of float8_e4m3fn if FP8."""
    if FP8:
        return held.to(tl.float8e4nv, bitcast=True).to(dtype)
    if dtype == tl.bfloat16:
        wide = held.to(tl.uint16)
        rest = ((wide & 0x7F) | 0x4300).to(tl.bfloat16, bitcast=True)
        sign = ((wide & 0x80) | 0x4300).to(tl.bfloat16, bitcast=True)
        return _minus(rest, sign)
    return held.to(tl.int8, bitcast=True).to(dtype)


@triton.jit
def nibbles_as(codes, dtype: tl.constexpr):
    """Convert 4-bit codes, minus `CENTRE`, to `dtype`."""
    if dtype == tl.bfloat16:
        shifted = (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
        return _minus(shifted, tl.full(codes.shape, 0x4308, tl.uint16).to(tl.bfloat16, bitcast=True))
    return (codes.to(tl.int32) - CENTRE).to(dtype)


@triton.jit
def _four(words, part, BITS: tl.constexpr, FP8: tl.constexpr, dtype: tl.constexpr):
    """Convert four codes of each word → [rows, words, 2, 2].

    8-bit codes are the word's bytes; 4-bit codes are the lower (`part` 0) or the upper halves (`part` 1) of the bytes.
    """
    first, second = _code(words, 0, part, BITS, FP8, dtype), _code(words, 1, part, BITS, FP8, dtype)
    third, fourth = _code(words, 2, part, BITS, FP8, dtype), _code(words, 3, part, BITS, FP8, dtype)
    return tl.join(tl.join(first, second), tl.join(third, fourth))


@triton.jit
def _code(words, number, part, BITS: tl.constexpr, FP8: tl.constexpr, dtype: tl.constexpr):
    held = ((words >> (8 * number)) & 255).to(tl.uint8)
    if BITS == 4:
        return nibbles_as((held >> (4 * part)) & 15, dtype)
    return bytes_as(held, FP8, dtype)


@triton.jit
def words_as(words, BITS: tl.constexpr, FP8: tl.constexpr, dtype: tl.constexpr):
    """Convert words of four bytes of codes, int32 [rows, words], to `dtype` → [rows, codes] in word order.

    `CENTRE` is subtracted from 4-bit codes; of each 16 words (or of all, if there are fewer), the codes in the lower
    halves come before those in the upper halves. Within 16 columns, the order is that of `in_word_order`.
    """
    return _nibbles_of(words, dtype) if BITS == 4 else _bytes_of(words, FP8, dtype)


@triton.jit
def _bytes_of(words, FP8: tl.constexpr, dtype: tl.constexpr):
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    if dtype != tl.bfloat16 or WIDE:
        codes = _four(words, 0, 8, FP8, dtype)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _FP8_PTX if FP8 else _INT8_PTX, "=h,=h,=h,=h,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
        codes = tl.join(tl.join(a, b), tl.join(c, d))
    codes = tl.reshape(codes, (ROWS, WORDS // 4, 4, 2, 2))
    return tl.reshape(tl.permute(codes, (0, 1, 4, 2, 3)), (ROWS, 4 * WORDS))


@triton.jit
def _nibbles_of(words, dtype: tl.constexpr):
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    TILES: tl.constexpr = (WORDS * 8 + TILE - 1) // TILE
    if dtype != tl.bfloat16 or WIDE:
        lower, upper = _four(words, 0, 4, False, dtype), _four(words, 1, 4, False, dtype)
    else:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _INT4_PTX, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                   tl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip
        lower, upper = tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h))
    codes = tl.reshape(tl.join(lower, upper), (ROWS, TILES, WORDS // TILES // 4, 4, 2, 2, 2))
    return tl.reshape(tl.permute(codes, (0, 1, 6, 2, 5, 3, 4)), (ROWS, 8 * WORDS))


@triton.jit
def in_word_order(x):
    """Reorder each 16 columns of x [tokens, columns] in the same way as `words_as` orders codes."""
    TOKENS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    x = tl.reshape(x, (TOKENS, COLUMNS // 16, 4, 2, 2))
    return tl.reshape(tl.permute(x, (0, 1, 3, 2, 4)), (TOKENS, COLUMNS))


@triton.jit
def in_column_order(codes):
    """Reverse `in_word_order`, for codes [rows, columns]."""
    ROWS: tl.constexpr = codes.shape[0]
    COLUMNS: tl.constexpr = codes.shape[1]
    codes = tl.reshape(codes, (ROWS, COLUMNS // 16, 2, 4, 2))
    return tl.reshape(tl.permute(codes, (0, 1, 3, 2, 4)), (ROWS, COLUMNS))


@triton.jit
def halves(matrix):
    """Split a matrix [rows, columns] into the first and the last half of its columns."""
    ROWS: tl.constexpr = matrix.shape[0]
    COLUMNS: tl.constexpr = matrix.shape[1]
    return tl.split(tl.permute(tl.reshape(matrix, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
