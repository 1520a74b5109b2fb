"""Generates vector code as LLVM IR, so that every sum has a fixed order.

A compiler that vectorizes a reduction picks its own lanes and unrolling, and picks differently for one row than for
eight; a request's numbers would then depend on the other rows of the step. Here every sum runs in 16 lanes that are
folded by halves. LLVM lowers the 16 lanes to the host's vectors (AVX-512, AVX2, NEON); nothing in this file depends on
an instruction set.

Addresses are int64. A `tag` is the numba type of the elements in memory: float32, or uint16 for the bits of bfloat16,
or int8. All arithmetic is float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

LANES = 16
F32 = ir.FloatType()
I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
VEC = ir.VectorType(F32, LANES)

Builder = Any
Value = Any
Codegen = Callable[[Any, Builder, Any, Any], Value]


def pointer(builder: Builder, address: Value, kind: Any) -> Value:
    """Cast an address to a pointer to the LLVM type `kind`."""
    return builder.inttoptr(address, kind.as_pointer())


def tag_bytes(tag: Any) -> int:
    """Return the size of one element of type `tag` in bytes."""
    if tag == types.int8:
        return 1
    return 4 if tag == types.float32 else 2


def widen(builder: Builder, bits: Value, wide: Any, integers: Any) -> Value:
    """Convert bfloat16 to float32; `bits` are the upper half of a float32's bits."""
    shift = ir.Constant(integers, 16 if integers is I32 else [16] * LANES)
    return builder.bitcast(builder.shl(builder.zext(bits, integers), shift), wide)


def load_element(builder: Builder, address: Value, tag: Any) -> Value:
    """Load one element of type `tag` as float32."""
    if tag == types.float32:
        return builder.load(pointer(builder, address, F32), align=4)
    if tag == types.int8:
        return builder.sitofp(builder.load(pointer(builder, address, I8), align=1), F32)
    return widen(builder, builder.load(pointer(builder, address, I16), align=2), F32, I32)


def load_vector(builder: Builder, address: Value, tag: Any) -> Value:
    """Load sixteen elements of type `tag` as float32."""
    if tag == types.float32:
        return builder.load(pointer(builder, address, VEC), align=4)
    if tag == types.int8:
        return builder.sitofp(builder.load(pointer(builder, address, ir.VectorType(I8, LANES)), align=1), VEC)
    bits = builder.load(pointer(builder, address, ir.VectorType(I16, LANES)), align=2)
    return widen(builder, bits, VEC, ir.VectorType(I32, LANES))


def store_rounded(builder: Builder, address: Value, value: Value, tag: Any) -> None:
    """Store one or sixteen float32 as elements of type `tag`, rounded to nearest, ties to even.

    Numbers that are stored as int8 must be within its range.
    """
    item = tag_bytes(tag)
    if tag == types.int8:
        narrow = like(value, I8)
        builder.store(builder.fptosi(nearest(builder, value), narrow), pointer(builder, address, narrow), align=1)
        return
    if tag == types.float32:
        builder.store(value, pointer(builder, address, value.type), align=item)
        return
    wide, narrow = like(value, I32), like(value, I16)
    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, constant(wide, 16)), constant(wide, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(wide, 0x7FFF))), constant(wide, 16))
    # Rounding up the bits of a NaN could carry into the exponent and give infinity.
    is_nan = builder.fcmp_unordered("uno", value, value)
    kept = builder.select(is_nan, constant(wide, 0x7FC0), rounded)
    builder.store(builder.trunc(kept, narrow), pointer(builder, address, narrow), align=item)


def nearest(builder: Builder, value: Value) -> Value:
    """Round one or sixteen float32 to integers, ties to even; the result is float32."""
    name = "llvm.rint.v16f32" if value.type == VEC else "llvm.rint.f32"
    rint = builder.module.declare_intrinsic(name, fnty=ir.FunctionType(value.type, [value.type]))
    return builder.call(rint, [value])


def like(value: Value, element: Any) -> Any:
    """Return the type `element` if `value` is a scalar, or a vector type of it with as many lanes as `value`."""
    return ir.VectorType(element, LANES) if isinstance(value.type, ir.VectorType) else element


def constant(kind: Any, value: float) -> Value:
    """Return the constant `value`, repeated in every lane if `kind` is a vector type; floats are rounded to float32."""
    vector = isinstance(kind, ir.VectorType)
    element = kind.element if vector else kind
    exact = float(np.float32(value)) if element == F32 else value
    return ir.Constant(kind, [exact] * LANES if vector else exact)


def multiply_add(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """Emit a · b + c, with a single rounding if the host supports it."""
    name = "llvm.fmuladd.v16f32" if c.type == VEC else "llvm.fmuladd.f32"
    kind = ir.FunctionType(c.type, [c.type] * 3)
    return builder.call(builder.module.declare_intrinsic(name, fnty=kind), [a, b, c])


def prefetch(builder: Builder, address: Value) -> None:
    """Emit a prefetch of the cache line at `address` into the L2 cache; the address need not be mapped."""
    byte = ir.IntType(8)
    kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), I32, I32, I32])
    fetch = builder.module.declare_intrinsic("llvm.prefetch.p0", fnty=kind)
    builder.call(fetch, [pointer(builder, address, byte), I32(0), I32(2), I32(1)])


def fold(builder: Builder, vectors: list[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """Combine the lanes of each vector into one number, and return the numbers as adjacent lanes of one vector.

    The number of vectors is a power of two up to 16. Each step combines the lower half of a vector's lanes with the
    upper half, and joins pairs of vectors, until each number is one lane.
    """
    width = LANES
    while width > 1:
        width //= 2
        if len(vectors) > 1:
            vectors = [
                combine(*_halves(builder, first, second, width))
                for first, second in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        else:
            vectors = [combine(*_halves(builder, vectors[0], None, width))]
    return vectors[0]


def _halves(builder: Builder, first: Value, second: Value | None, width: int) -> tuple[Value, Value]:
    """Return the lower and the upper `width` lanes of every group of 2 · `width` lanes, of one vector or of two."""
    lanes = first.type.count * (1 if second is None else 2)
    second_vector = ir.Constant(first.type, ir.Undefined) if second is None else second
    lower = [lane for lane in range(lanes) if lane % (2 * width) < width]
    kind = ir.VectorType(I32, len(lower))
    return (
        builder.shuffle_vector(first, second_vector, ir.Constant(kind, lower)),
        builder.shuffle_vector(first, second_vector, ir.Constant(kind, [lane + width for lane in lower])),
    )


def splat(builder: Builder, scalar: Value) -> Value:
    """Copy a scalar to all sixteen lanes."""
    undefined = ir.Constant(VEC, ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))


def loop(
    builder: Builder, start: Value, stop: Value, step: int, carried: list[Value], body: Callable[..., list[Value]]
) -> list[Value]:
    """Emit a loop: for (i = start; i < stop; i += step) carried = body(i, *carried).

    Returns the last values of `carried`. The loop is not unrolled, because bodies are already large.
    """
    entry = builder.block
    head = builder.append_basic_block("head")
    inside = builder.append_basic_block("inside")
    after = builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    phis = [builder.phi(value.type) for value in carried]
    index.add_incoming(start, entry)
    for phi, value in zip(phis, carried, strict=True):
        phi.add_incoming(value, entry)
    builder.cbranch(builder.icmp_signed("<", index, stop), inside, after)
    builder.position_at_end(inside)
    results = body(index, *phis)
    last = builder.block
    index.add_incoming(builder.add(index, I64(step)), last)
    for phi, value in zip(phis, results, strict=True):
        phi.add_incoming(value, last)
    builder.branch(head).set_metadata("llvm.loop", _not_unrolled(builder.module))
    builder.position_at_end(after)
    return phis


def _not_unrolled(module: Any) -> Any:
    """Return a metadata node that forbids LLVM to unroll one loop; the node's first operand must be the node itself."""
    rule = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    node = ir.values.MDValue(module, [rule], name=str(len(module.metadata)))
    node.operands = (node, rule)
    return node


def row_addresses(builder: Builder, base: Value, stride: Value, rows: int) -> list[Value]:
    """Return the addresses of `rows` rows that are `stride` bytes apart."""
    return [builder.add(base, builder.mul(stride, I64(row))) for row in range(rows)]


def at(builder: Builder, base: Value, index: Value, item_bytes: int) -> Value:
    """Return the address of element `index` of the array at `base`, whose elements have `item_bytes` bytes."""
    return builder.add(base, builder.mul(index, I64(item_bytes)))


@dataclass(frozen=True, slots=True)
class Function:
    """A function that is emitted once per LLVM module and then called; `emit(builder, tag, args)` writes its body."""

    name: str
    emit: Callable[[Builder, Any, Any], None]

    def call(self, builder: Builder, tag: Any, args: Sequence[Value]) -> None:
        """Emit a call of the function; if the module does not contain the function yet, emit it first."""
        symbol = f"tandem_{self.name}_{tag}"
        function = builder.module.globals.get(symbol)
        if function is None:
            kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
            function = ir.Function(builder.module, kind, symbol)
            function.linkage = "internal"
            function.attributes.add("noinline")
            inside = ir.IRBuilder(function.append_basic_block("entry"))
            self.emit(inside, tag, function.args)
            inside.ret_void()
        builder.call(function, args)


def steps(builder: Builder, stop: Value, sizes: Sequence[int], body: Callable[[Value, int], None]) -> None:
    """Emit body(i, size) for consecutive pieces of 0 .. `stop`.

    There are as many pieces of the largest size as fit, then as many of the next size, and so on down to 1. `sizes` are
    descending powers of two.
    """
    start: Value = I64(0)
    for size in sizes:
        end = builder.add(start, builder.and_(builder.sub(stop, start), I64(-size)))

        def once(i: Value, size: int = size) -> list[Value]:
            body(i, size)
            return []

        loop(builder, start, end, size, [], once)
        start = end


def exponential(builder: Builder, x: Value) -> Value:
    """Emit e^x of one or sixteen float32, within 2 ulp; 0 below -87, and e^88 above 88.

    x = n·ln 2 + r with |r| <= ln 2 / 2, with ln 2 in two parts (Cody and Waite), and a minimax polynomial in r.
    """
    kind, integers = x.type, like(x, I32)

    def number(value: float) -> Value:
        return constant(kind, value)

    capped = builder.select(builder.fcmp_ordered(">", x, number(88.0)), number(88.0), x)
    floored = builder.select(builder.fcmp_ordered("<", capped, number(-87.0)), number(-87.0), capped)
    n = nearest(builder, builder.fmul(floored, number(1.4426950408889634)))
    r = multiply_add(builder, n, number(-0.693359375), floored)
    r = multiply_add(builder, n, number(2.12194440e-4), r)
    value = number(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5, 1.0, 1.0):
        value = multiply_add(builder, value, r, number(coefficient))
    exponent = builder.add(builder.fptosi(n, integers), constant(integers, 127))
    scaled = builder.fmul(value, builder.bitcast(builder.shl(exponent, constant(integers, 23)), kind))
    return builder.select(builder.fcmp_ordered("<", x, number(-87.0)), number(0.0), scaled)


def hyperbolic_tangent(builder: Builder, x: Value) -> Value:
    """Emit tanh of one or sixteen float32, with a relative error of about 2e-7.

    An odd polynomial near 0 with the coefficients of Cephes' tanhf, and (1 - e^-2|x|) / (1 + e^-2|x|) elsewhere.
    """

    def number(value: float) -> Value:
        return constant(x.type, value)

    negative = builder.fcmp_ordered("<", x, number(0.0))
    size = builder.select(negative, builder.fneg(x), x)
    square = builder.fmul(size, size)
    near = number(-5.70498872745e-3)
    for coefficient in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        near = multiply_add(builder, near, square, number(coefficient))
    near = multiply_add(builder, builder.fmul(near, square), size, size)
    falling = exponential(builder, builder.fmul(size, number(-2.0)))
    far = builder.fdiv(builder.fsub(number(1.0), falling), builder.fadd(number(1.0), falling))
    magnitude = builder.select(builder.fcmp_ordered("<", size, number(0.625)), near, far)
    return builder.select(negative, builder.fneg(magnitude), magnitude)
