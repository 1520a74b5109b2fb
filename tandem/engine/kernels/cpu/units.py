"""Products of bfloat16 pairs, for hosts that have instructions for them, and loads of only a vector's first lanes.

This module and `integer_units.py` detect the host's instruction set, and generate the code that depends on it.
"""

from typing import Any

import numba
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types

from tandem.engine.kernels.cpu.ir import (
    F32,
    I16,
    I32,
    LANES,
    VEC,
    Builder,
    Value,
    pointer,
    widen,
)


def has_pair_products() -> bool:
    """Return True if the host multiplies pairs of bfloat16 into float32 lanes (AVX512_BF16)."""
    return _host_has("avx512bf16")


def has_wide_registers() -> bool:
    """Return True if a register holds sixteen float32 and there are 32 registers (AVX-512)."""
    return _host_has("avx512f")


def _host_has(feature: str) -> bool:
    chosen = numba.config.CPU_FEATURES
    if chosen is not None:
        return f"+{feature}" in str(chosen)
    return bool(get_host_cpu_features().get(feature, False))


class BFloatType(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat type, which llvmlite does not define."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloatType)

    def __hash__(self) -> int:
        return hash(BFloatType)


def load_pairs(builder: Builder, address: Value, tag: Any) -> Value:
    """Load sixteen pairs of bfloat16."""
    kind = ir.VectorType(BFloatType(), 2 * LANES)
    return builder.load(pointer(builder, address, kind), align=2)


def multiply_pairs(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """Emit a dot product of bfloat16 pairs: lane i is c[i] + a[2i] · b[2i] + a[2i + 1] · b[2i + 1], in float32."""
    kind = ir.FunctionType(VEC, [VEC, a.type, b.type])
    return builder.call(builder.module.declare_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", fnty=kind), [c, a, b])


def first_lanes(builder: Builder, count: Value, lanes: int) -> Value:
    """Return a mask of `lanes` bits whose first `count` are set."""
    kind = ir.VectorType(I32, lanes)
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, builder.trunc(count, I32), I32(0))
    every = builder.shuffle_vector(one, undefined, ir.Constant(kind, [0] * lanes))
    return builder.icmp_signed("<", ir.Constant(kind, list(range(lanes))), every)


def load_masked(builder: Builder, address: Value, mask: Value, tag: Any, pairs: bool) -> Value:
    """Load the lanes that `mask` sets; the other lanes are 0, and their memory is not accessed."""
    lanes = mask.type.count
    element, suffix = (F32, "f32") if tag == types.float32 else (I16, "i16")
    kind = ir.VectorType(element, lanes)
    signature = ir.FunctionType(kind, [kind.as_pointer(), I32, mask.type, kind])
    name = f"llvm.masked.load.v{lanes}{suffix}.p0"
    function = builder.module.globals.get(name) or ir.Function(builder.module, signature, name)
    zeros = ir.Constant(kind, [0.0 if element is F32 else 0] * lanes)
    loaded = builder.call(function, [pointer(builder, address, kind), I32(2 if element is I16 else 4), mask, zeros])
    if tag == types.float32:
        return loaded
    if pairs:
        return builder.bitcast(loaded, ir.VectorType(BFloatType(), lanes))
    return widen(builder, loaded, VEC, ir.VectorType(I32, LANES))
