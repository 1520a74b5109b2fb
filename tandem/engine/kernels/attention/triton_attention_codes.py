"""Device functions of decode attention over 8-bit keys and values; `triton_attention_tiles.py` has the 16-bit ones.

Codes are loaded as 16-bit words that hold the codes of an even dimension and of the odd dimension after it, so that the
words are loaded into the layout of the tensor cores like 16-bit numbers. One permutation of bytes turns two words into
two float16 numbers of even dimensions, another into two of odd dimensions; even and odd dimensions are then multiplied
separately. Float16 holds all codes of either dtype exactly. The scales of keys multiply the scores. The scales of
values cannot multiply the softmax weights, because small products would underflow in float16. Instead, the scales'
logarithms are added to the scores before the maximum is subtracted, so that the largest product is 1; for the sum of
the weights, each product is divided by its scale again.
"""

import triton
import triton.language as tl

from tandem.engine.kernels.attention.triton_attention_tiles import (
    LOG2_E,
    finite,
    heads_of,
    is_seen,
    page_of_tile,
    token_offsets,
)
from tandem.engine.kernels.triton_launch import INTERPRETED
from tandem.engine.kernels.triton_math import tanh

_WIDE = tl.constexpr(INTERPRETED)
"""True in Triton's interpreter, which has no inline assembly and multiplies in float32."""
BIAS = tl.constexpr(128)
"""The number that is added to int8 codes, so that they can be multiplied as unsigned numbers."""
TINY = tl.constexpr(2.0**-24)
"""The smallest positive number of float16."""
_MOST_EXPONENT = tl.constexpr(126.0)
"""Maximum exponent of a softmax weight: the sum of several weights of 2^126 is still finite in float32."""
LEAST_SCALE = tl.constexpr(2.0**-60)
"""Minimum scale of values: smaller scales are raised to it, because their logarithm may not be finite."""


@triton.jit
def _split_query(at, held, dtype: tl.constexpr):
    """Load queries, and return their even dimensions, their odd dimensions (both in `dtype`) and a divisor.

    `at` points to the even dimensions; elements are loaded where the mask `held` is True, and 0 elsewhere. All queries
    are divided by the divisor, a power of 2 that makes them smaller than 2, so that float16 can represent them.
    """
    even = tl.load(at, mask=held, other=0.0).to(tl.float32)
    odd = tl.load(at + 1, mask=held, other=0.0).to(tl.float32)
    bits = tl.maximum(tl.abs(even).to(tl.int32, bitcast=True), tl.abs(odd).to(tl.int32, bitcast=True))
    exponent = tl.minimum(tl.maximum(tl.max(tl.max(bits, axis=1), axis=0) >> 23, 1), 253)
    unit = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (even * inverse).to(dtype), (odd * inverse).to(dtype), unit


@triton.jit
def _numbers(words, ODD: tl.constexpr, BIASED: tl.constexpr, FP8: tl.constexpr, dtype: tl.constexpr):
    """Return one of the two 8-bit codes of each int16 of `words`, the high byte if ODD, converted to `dtype`.

    `dtype` is float32 or float16. Codes are float8_e4m3fn if FP8, else int8; `BIAS` is added to int8 codes if BIASED.
    On a GPU, int8 codes in float16 are returned multiplied by `TINY`, the smallest positive float16 number: float16
    bits n < 2048 represent n · TINY, so the byte code + 128 serves as float16 bits without a conversion.
    """
    if dtype == tl.float16 and not _WIDE:
        if FP8:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 both; .reg .b16 low, high; prmt.b32 both, $1, $1, "
                + ("0x3131" if ODD else "0x2020")
                + "; mov.b32 {low, high}, both; cvt.rn.f16x2.e4m3x2 $0, low; }",
                "=r,r",
                [words],
                dtype=tl.float16,
                is_pure=True,
                pack=2,
            )
        biased = tl.inline_asm_elementwise(
            "{ .reg .b32 t; xor.b32 t, $1, 0x80808080; prmt.b32 $0, t, 0, " + ("0x4341" if ODD else "0x4240") + "; }",
            "=r,r",
            [words],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
        return biased if BIASED else biased - BIAS * TINY
    held = words >> 8 if ODD else (words << 8) >> 8
    if FP8:
        return held.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(dtype)
    return (held + BIAS if BIASED else held).to(dtype)


@triton.jit
def _log2(x):
    """Return the binary logarithm of x, with an error of up to 2^-22."""
    if _WIDE:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _reciprocal(x):
    """Return 1 / x, with a relative error of up to 2^-23."""
    if _WIDE:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _add_product(a, b, sums):
    """Return sums + a · b."""
    if _WIDE:
        return sums + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def _scales_at(
    plane, page, tile, page_stride, PAGE_TOKENS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, ROW: tl.constexpr
):
    """Return pointers [BLOCK_TOKENS] to the scales of a tile's tokens; `plane` points to the head's codes in page 0."""
    token = tl.arange(0, BLOCK_TOKENS)
    scales = plane + page.to(tl.int64) * page_stride + PAGE_TOKENS * ROW
    return scales.to(tl.pointer_type(tl.float32), bitcast=True) + (tile * BLOCK_TOKENS + token) % PAGE_TOKENS


@triton.jit
def attend_to_codes(
    q_at,
    held,
    keys,
    values,
    table,
    page,
    start,
    end,
    begin,
    context,
    page_stride,
    log2_scale,
    sinks,
    split,
    contexts,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Compute the same as `attend` over 8-bit codes, with queries loaded from `q_at` [GROUP_TILE] where `held`."""
    WORDS: tl.constexpr = HEAD_DIM // 2
    VALUE_WORDS: tl.constexpr = VALUE_DIM // 2
    FP8: tl.constexpr = keys.dtype.element_ty == tl.float8e4nv
    wide: tl.constexpr = q_at.dtype.element_ty == tl.float32
    dtype: tl.constexpr = tl.float32 if wide else tl.float16
    token = tl.arange(0, BLOCK_TOKENS)
    word = tl.arange(0, DIM_PADDED // 2)
    even, odd, unit = _split_query(q_at[:, None] + 2 * word[None, :], held[:, None] & (word < WORDS)[None, :], dtype)
    BIASED: tl.constexpr = not FP8 and not wide
    FACTOR: tl.constexpr = TINY if BIASED and not _WIDE else 1.0
    first_scores = tl.zeros([GROUP_TILE, BLOCK_TOKENS], tl.float32)
    if BIASED:
        summed = tl.sum(even.to(tl.float32), axis=1) + tl.sum(odd.to(tl.float32), axis=1)
        first_scores -= (summed * (BIAS * FACTOR))[:, None]
    value_word = tl.arange(0, VALUE_PADDED // 2)
    if PAGE_TOKENS % BLOCK_TOKENS == 0:
        cells = token[:, None] * WORDS + word[None, :]
        value_cells = token[:, None] * VALUE_WORDS + value_word[None, :]
    else:
        cells = word[None, :]
        value_cells = value_word[None, :]
    highest = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    mixed_even = tl.zeros([GROUP_TILE, VALUE_PADDED // 2], tl.float32)
    mixed_odd = tl.zeros([GROUP_TILE, VALUE_PADDED // 2], tl.float32)
    for tile in tl.range(start, end):
        offset = token_offsets(page, tile, page_stride, PAGE_TOKENS, BLOCK_TOKENS, HEAD_DIM)
        value_offset = token_offsets(page, tile, page_stride, PAGE_TOKENS, BLOCK_TOKENS, VALUE_DIM)
        key_scale_at = _scales_at(keys, page, tile, page_stride, PAGE_TOKENS, BLOCK_TOKENS, HEAD_DIM)
        value_scale_at = _scales_at(values, page, tile, page_stride, PAGE_TOKENS, BLOCK_TOKENS, VALUE_DIM)
        # The next tile's page id is loaded while this tile is computed.
        page = page_of_tile(table, tile + 1, begin, context, PAGE_TOKENS, BLOCK_TOKENS)
        position = tile * BLOCK_TOKENS + token
        seen = position < context
        if WINDOW != 0:
            seen = seen & (position >= begin)
        loaded = seen[:, None] & (word < WORDS)[None, :]
        key = tl.load((keys + offset).to(tl.pointer_type(tl.int16), bitcast=True) + cells, mask=loaded, other=0)
        key_scale = tl.load(key_scale_at, mask=seen, other=0.0)
        scores = _add_product(even, tl.trans(_numbers(key, False, BIASED, FP8, dtype)), first_scores)
        scores = _add_product(odd, tl.trans(_numbers(key, True, BIASED, FP8, dtype)), scores)
        scores = scores * (key_scale * (unit * log2_scale / FACTOR))[None, :]
        if SOFTCAP > 0:
            scores = tanh(scores / SOFTCAP) * SOFTCAP
        value_scale = tl.load(value_scale_at, mask=seen, other=1.0)
        value_scale = tl.where(value_scale < LEAST_SCALE, LEAST_SCALE, value_scale)
        visible = is_seen(position, seen, contexts, WINDOW, TOKENS)
        scores = tl.where(visible, scores + _log2(value_scale)[None, :], float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        base = finite(higher, TOKENS)
        weight = tl.exp2(scores - base[:, None])
        fade = tl.exp2(highest - base)
        total = total * fade + tl.sum(weight * _reciprocal(value_scale)[None, :], axis=1)
        value_loaded = seen[:, None] & (value_word < VALUE_WORDS)[None, :]
        value_at = (values + value_offset).to(tl.pointer_type(tl.int16), bitcast=True) + value_cells
        value = tl.load(value_at, mask=value_loaded, other=0)
        weight = weight.to(dtype)
        mixed_even = _add_product(weight, _numbers(value, False, False, FP8, dtype), mixed_even * fade[:, None])
        mixed_odd = _add_product(weight, _numbers(value, True, False, FP8, dtype), mixed_odd * fade[:, None])
        highest = higher
    if SINKS:  # noqa: SIM102 - a constant
        if split == 0:
            # After the loop: a sink above all scores would make the weights, which contain scales, too small for
            # float16.
            head = heads_of(GROUP_TILE, GROUP_PADDED, TOKENS)
            sink = tl.load(sinks + head, mask=head < GROUP, other=0.0) * LOG2_E
            highest = tl.where(highest == float("-inf"), sink, highest)
            total += tl.exp2(tl.minimum(sink - highest, _MOST_EXPONENT))
    return highest, total, tl.interleave(mixed_even, mixed_odd) / FACTOR
