"""Products of unsigned weight codes with signed activation codes, summed exactly in 32-bit lanes.

One lane multiplies four columns. Where the host has VNNI (`vpdpbusd`), that is one instruction, and an activation's
code is a byte. Elsewhere both operands are widened to 16 bits and multiplied in pairs, the even columns and then the
odd ones, and activations are stored in that order. The sums are the same integers either way.
"""

from functools import lru_cache

import numba
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features

from tandem.engine.kernels.cpu.ir import I8, I16, I32, I64, LANES, Builder, Value, pointer

LINE_BYTES = 64
"""Number of bytes of a panel's line: one 32-bit lane for each of sixteen rows."""
INTS = ir.VectorType(I32, LANES)
_WORDS = ir.VectorType(I16, 2 * LANES)


@lru_cache(maxsize=1)
def multiplies_bytes() -> str | None:
    """Return the host's instruction set that multiplies four bytes in a lane ("avx512vnni" or "avxvnni"), or None."""
    chosen = numba.config.CPU_FEATURES
    for feature in ("avx512vnni", "avxvnni"):
        if f"+{feature}" in str(chosen) if chosen is not None else get_host_cpu_features().get(feature, False):
            return feature
    return None


def unit_bytes() -> int:
    """Return the number of bytes of a unit of four activation codes in memory."""
    return 4 if multiplies_bytes() else 8


def store_codes(builder: Builder, address: Value, codes: Value) -> None:
    """Store sixteen int32 as activation codes, in the layout that `load_activation` reads."""
    if multiplies_bytes():
        narrow = ir.VectorType(I8, LANES)
        builder.store(builder.trunc(codes, narrow), pointer(builder, address, narrow), align=1)
        return
    words = builder.trunc(codes, ir.VectorType(I16, LANES))
    order = [unit + lane for unit in range(0, LANES, 4) for lane in (0, 2, 1, 3)]
    paired = builder.shuffle_vector(words, words, ir.Constant(INTS, order))
    builder.store(paired, pointer(builder, address, words.type), align=2)


def load_weights(builder: Builder, address: Value, bits: int) -> list[list[Value]]:
    """Load a panel's line of 64 bytes, and return the operands of each unit of four columns.

    The line is one unit of 8-bit codes, or two units of 4-bit codes.
    """
    line = builder.load(pointer(builder, address, INTS), align=4)

    def shifted(bits: int) -> Value:
        return builder.lshr(line, ir.Constant(INTS, [bits] * LANES)) if bits else line

    def masked(bits: int, mask: int) -> Value:
        return builder.and_(shifted(bits), ir.Constant(INTS, [mask] * LANES))

    if multiplies_bytes():
        return [[line]] if bits == 8 else [[masked(shift, 0x0F0F0F0F)] for shift in (0, 4)]
    if bits == 8:
        return [[masked(0, 0x00FF00FF), masked(8, 0x00FF00FF)]]
    return [[masked(shift, 0x000F000F), masked(shift + 8, 0x000F000F)] for shift in (0, 4)]


def load_activation(builder: Builder, address: Value) -> list[Value]:
    """Load a unit of four activation codes of a token, and return it as operands with the same value in every lane."""
    places = [builder.add(address, I64(4 * part)) for part in range(unit_bytes() // 4)]
    return [splat_int(builder, builder.load(pointer(builder, place, I32), align=4)) for place in places]


def splat_int(builder: Builder, scalar: Value) -> Value:
    """Copy an int32 to all sixteen lanes."""
    undefined = ir.Constant(INTS, ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


def add_products(builder: Builder, weights: list[Value], activations: list[Value], sums: Value) -> Value:
    """Add the products of one unit of weights and activations, for sixteen weight rows, to the rows' sums."""
    extension = multiplies_bytes()
    if extension is None:
        for weight, activation in zip(weights, activations, strict=True):
            sums = builder.add(sums, _multiply_words(builder, weight, activation))
        return sums
    lanes = LANES if extension == "avx512vnni" else LANES // 2
    kind = ir.VectorType(I32, lanes)
    signature = ir.FunctionType(kind, [kind] * 3)
    multiply = builder.module.declare_intrinsic(f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", fnty=signature)
    if lanes == LANES:
        return builder.call(multiply, [sums, *weights, *activations])
    halves = [
        builder.call(multiply, [_lanes(builder, vector, first, lanes) for vector in (sums, *weights, *activations)])
        for first in (0, lanes)
    ]
    return builder.shuffle_vector(*halves, ir.Constant(INTS, list(range(LANES))))


def _multiply_words(builder: Builder, a: Value, b: Value) -> Value:
    """Return the sums of the products of adjacent 16-bit numbers.

    The code is written so that LLVM emits the single x86 instruction for it.
    """
    wide = ir.VectorType(I32, 2 * LANES)
    products = builder.mul(*(builder.sext(builder.bitcast(words, _WORDS), wide) for words in (a, b)))
    return builder.add(
        _lanes(builder, products, 0, LANES, step=2),
        _lanes(builder, products, 1, LANES, step=2),
    )


def _lanes(builder: Builder, vector: Value, first: int, count: int, step: int = 1) -> Value:
    chosen = ir.Constant(ir.VectorType(I32, count), [first + step * lane for lane in range(count)])
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), chosen)
