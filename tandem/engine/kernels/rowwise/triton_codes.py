"""The store of keys and values, quantized in registers to exactly the bits that `quantize_kv` defines."""

import triton
import triton.language as tl

from tandem.engine.kernels.triton_math import LARGEST_FP8, LARGEST_INT8, as_codes


@triton.jit
def store_head(at, scale_at, first, second, gap, mask, present, CODES: tl.constexpr, rounded: tl.constexpr):
    """Store one head of several tokens in the KV cache: as 8-bit codes with scales if CODES, else in the dtype of `at`.

    The arguments are those of `_store_codes`, but `scale_at` is passed as a pointer of the type of `at`, and is cast to
    a float32 pointer here. Without CODES, `scale_at`, `present` and `rounded` are unused.
    """
    if CODES:
        scale_at = scale_at.to(tl.pointer_type(tl.float32), bitcast=True)
        _store_codes(at, scale_at, first, second, gap, mask, present, rounded)
    else:
        dtype: tl.constexpr = at.dtype.element_ty
        tl.store(at, first.to(dtype), mask=mask)
        tl.store(at + gap, second.to(dtype), mask=mask)


@triton.jit
def _store_codes(at, scale_at, first, second, gap, mask, present, rounded: tl.constexpr):
    """Store one head of some tokens as 8-bit codes and a float32 scale.

    first and second [tokens, lanes] are the numbers to store at `at` and at `at + gap`; they are 0 in lanes outside of
    the head's dimensions. They are rounded to the dtype `rounded` before they are quantized. scale_at and present are
    [tokens, 1]. The scale is NaN if any number is not finite.
    """
    kind: tl.constexpr = at.dtype.element_ty
    largest: tl.constexpr = LARGEST_FP8 if kind == tl.float8e4nv else LARGEST_INT8
    x, y = first.to(rounded).to(tl.float32), second.to(rounded).to(tl.float32)
    # The maximum of the bits, of which those of NaN are the largest: a maximum of numbers would ignore NaN.
    bits = tl.maximum(tl.abs(x).to(tl.int32, bitcast=True), tl.abs(y).to(tl.int32, bitcast=True))
    most = tl.max(bits, axis=1, keep_dims=True).to(tl.float32, bitcast=True)
    factor = store_scale(most, scale_at, present, largest)
    tl.store(at, as_codes(x * factor, largest, kind), mask=mask)
    tl.store(at + gap, as_codes(y * factor, largest, kind), mask=mask)


@triton.jit
def store_scale(most, scale_at, present, largest: tl.constexpr):
    """Store the scale of codes of at most `largest` for numbers of at most `most`, and return numbers' factor to codes.

    The scale is NaN if `most` is not finite.
    """
    most_allowed = tl.full(most.shape, largest, tl.float32)
    tl.store(scale_at, tl.div_rn(most, most_allowed) + (most - most), mask=present)
    return tl.div_rn(most_allowed, tl.where(most > 0, most, 1.0))
