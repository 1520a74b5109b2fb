"""Functions of float32 numbers that Triton, or its interpreter, does not have."""

import triton
import triton.language as tl

LARGEST_INT8, LARGEST_FP8 = tl.constexpr(127.0), tl.constexpr(448.0)
"""The largest codes of int8 and float8_e4m3fn."""
ROUNDER = tl.constexpr(1.5 * 2**23)
"""A constant that rounds: a float32 below 2²² plus this has the rounded number, ties to even, in its lowest bits."""


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent of float32 numbers, with a relative error of about 2e-7.

    An odd polynomial near 0, where the exponential would cancel (its coefficients are those of Cephes' tanhf), and
    (1 - e^-2|x|) / (1 + e^-2|x|) elsewhere; neither overflows.
    """
    size = tl.abs(x)
    low = tl.minimum(size, 1.0)
    square = low * low
    near = -5.70498872745e-3
    near = near * square + 2.06390887954e-2
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    near = near * square * low + low
    falling = tl.exp(-2.0 * size)
    magnitude = tl.where(size < 0.625, near, (1.0 - falling) / (1.0 + falling))
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def gelu_tanh(x):
    """Return x · Φ(x) of float32 in the approximation with tanh (Hendrycks and Gimpel, arXiv:1606.08415)."""
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def as_codes(numbers, largest: tl.constexpr, kind: tl.constexpr):
    """Convert float32 numbers to codes of at most `largest`; int8 codes are rounded to nearest, ties to even."""
    # The clamp also prevents that the caller's product and the sum below become one fused operation, which rounds once.
    numbers = tl.minimum(tl.maximum(numbers, -largest), largest)
    if kind == tl.int8:
        return (numbers + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)
    return numbers.to(kind)
