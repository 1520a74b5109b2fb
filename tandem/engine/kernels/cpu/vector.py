"""Memory access and float32 arithmetic of the CPU kernels, for single elements and for rows.

Addresses are int64. `tag` is a dummy argument whose type is that of the elements in memory: float32, uint16 for the
bits of bfloat16, or int8. Rows may have any length n. The result of an element depends only on that element, and a sum
has the order of accumulation that `ir.py` defines.
"""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from tandem.engine.kernels.cpu.ir import (
    I32,
    I64,
    LANES,
    VEC,
    Builder,
    Function,
    Value,
    at,
    constant,
    exponential,
    fold,
    hyperbolic_tangent,
    load_element,
    load_vector,
    loop,
    multiply_add,
    pointer,
    splat,
    steps,
    store_rounded,
    tag_bytes,
)

_GELU = 0.7978845608028654
"""√(2 / π), used in the tanh approximation of GELU."""
Fetch = Callable[[Value, Any], Value]
Put = Callable[[Value, Any, Value], None]
Spread = Callable[[Value], Value]


def _rowwise(name: str, body: Callable[[Builder, Any, Any, Fetch, Put, Spread], None]) -> Function:
    """Return a function that applies `body` to rows of n elements, one or sixteen at a time; its last argument is n.

    The body gets `fetch(address, tag)` and `put(address, tag, value)`, which load and store the current elements of a
    row, and `spread`, which repeats a float32 argument in every lane.
    """

    def emit(builder: Builder, tag: Any, args: Any) -> None:
        def some(i: Value, width: int) -> None:
            def fetch(address: Value, tag: Any) -> Value:
                place = at(builder, address, i, tag_bytes(tag))
                return load_vector(builder, place, tag) if width > 1 else load_element(builder, place, tag)

            def put(address: Value, tag: Any, value: Value) -> None:
                store_rounded(builder, at(builder, address, i, tag_bytes(tag)), value, tag)

            body(builder, tag, args[:-1], fetch, put, lambda value: splat(builder, value) if width > 1 else value)

        steps(builder, args[-1], (LANES, 1), some)

    return Function(name, emit)


def _emit_add(builder: Builder, tag: Any, args: Any, fetch: Fetch, put: Put, spread: Spread) -> None:
    y, source = args
    put(y, types.float32, builder.fadd(fetch(y, types.float32), fetch(source, tag)))


def _emit_scale(builder: Builder, tag: Any, args: Any, fetch: Fetch, put: Put, spread: Spread) -> None:
    y, factor, target = args
    put(target, tag, builder.fmul(fetch(y, types.float32), spread(factor)))


def _emit_widen(builder: Builder, tag: Any, args: Any, fetch: Fetch, put: Put, spread: Spread) -> None:
    source, target = args
    put(target, tag, fetch(source, types.int8))


def _emit_multiply(builder: Builder, tag: Any, args: Any, fetch: Fetch, put: Put, spread: Spread) -> None:
    y, source = args
    put(y, types.float32, builder.fmul(fetch(y, types.float32), fetch(source, types.float32)))


def _emit_norm(builder: Builder, tag: Any, args: Any, fetch: Fetch, put: Put, spread: Spread) -> None:
    source, factor, norm, target = args
    put(target, tag, builder.fmul(builder.fmul(fetch(source, tag), spread(factor)), fetch(norm, tag)))


def _emit_wide_norm(builder: Builder, tag: Any, args: Any, fetch: Fetch, put: Put, spread: Spread) -> None:
    source, factor, norm, target = args
    put(target, tag, builder.fmul(builder.fmul(fetch(source, tag), spread(factor)), fetch(norm, types.float32)))


def _emit_gate(builder: Builder, tag: Any, args: Any, fetch: Fetch, put: Put, spread: Spread) -> None:
    gate, up, target = args
    g = fetch(gate, types.float32)
    falling = exponential(builder, builder.fneg(g))
    silu = builder.fdiv(g, builder.fadd(falling, constant(g.type, 1.0)))
    put(target, tag, builder.fmul(silu, fetch(up, types.float32)))


def _emit_gelu(builder: Builder, tag: Any, args: Any, fetch: Fetch, put: Put, spread: Spread) -> None:
    gate, up, target = args
    g = fetch(gate, types.float32)
    square = builder.fmul(g, g)
    inner = builder.fmul(g, multiply_add(builder, square, constant(g.type, _GELU * 0.044715), constant(g.type, _GELU)))
    half = builder.fmul(g, constant(g.type, 0.5))
    gelu = multiply_add(builder, half, hyperbolic_tangent(builder, inner), half)
    put(target, tag, builder.fmul(gelu, fetch(up, types.float32)))


def _emit_cap(builder: Builder, tag: Any, args: Any, fetch: Fetch, put: Put, spread: Spread) -> None:
    y, factor, cap = args
    inner = builder.fmul(fetch(y, types.float32), spread(factor))
    put(y, types.float32, builder.fmul(hyperbolic_tangent(builder, inner), spread(cap)))


def _emit_soften(builder: Builder, tag: Any, args: Any, fetch: Fetch, put: Put, spread: Spread) -> None:
    y, scale, largest = args
    exponent = multiply_add(builder, fetch(y, types.float32), spread(scale), builder.fneg(spread(largest)))
    put(y, types.float32, exponential(builder, exponent))


def _emit_combine(builder: Builder, tag: Any, args: Any, fetch: Fetch, put: Put, spread: Spread) -> None:
    y, kept, source, added = args
    first = builder.fmul(fetch(y, types.float32), spread(kept))
    put(y, types.float32, multiply_add(builder, fetch(source, types.float32), spread(added), first))


_ADD, _SCALE = _rowwise("add", _emit_add), _rowwise("scale", _emit_scale)
_WIDEN, _MULTIPLY = _rowwise("widen", _emit_widen), _rowwise("multiply", _emit_multiply)
_NORM, _WIDE_NORM = _rowwise("norm", _emit_norm), _rowwise("wide_norm", _emit_wide_norm)
_GATE, _GELU_GATE, _CAP = _rowwise("gate", _emit_gate), _rowwise("gelu", _emit_gelu), _rowwise("cap", _emit_cap)
_SOFTEN, _COMBINE = _rowwise("soften", _emit_soften), _rowwise("combine", _emit_combine)


def _calls(function: Function) -> Any:
    """Return the code generator of an intrinsic that calls `function`; the intrinsic's last argument is the tag."""

    def codegen(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        function.call(builder, signature.args[-1], args[:-1])
        return context.get_dummy_value()

    return codegen


@intrinsic
def add_row(typingctx, y, source, n, tag):  # type: ignore[no-untyped-def]
    """Emit y += source; y is float32, source of type `tag`."""
    return types.void(*[types.int64] * 3, tag), _calls(_ADD)


@intrinsic
def scale_row(typingctx, y, factor, target, n, tag):  # type: ignore[no-untyped-def]
    """Emit target = y · factor; y is float32, target of type `tag`. Both may be the same float32 row."""
    return types.void(types.int64, types.float32, types.int64, types.int64, tag), _calls(_SCALE)


@intrinsic
def widen_row(typingctx, source, target, n, tag):  # type: ignore[no-untyped-def]
    """Emit target = source; source is int8, target of type `tag`, which represents every int8 exactly."""
    return types.void(*[types.int64] * 3, tag), _calls(_WIDEN)


@intrinsic
def multiply_row(typingctx, y, source, n, tag):  # type: ignore[no-untyped-def]
    """Emit y *= source in float32; the tag must be that of float32."""
    return types.void(*[types.int64] * 3, tag), _calls(_MULTIPLY)


@intrinsic
def norm_row(typingctx, source, factor, norm, target, n, tag):  # type: ignore[no-untyped-def]
    """Emit target = source · factor · norm; source, norm and target are of type `tag`."""
    return types.void(types.int64, types.float32, *[types.int64] * 3, tag), _calls(_NORM)


@intrinsic
def wide_norm_row(typingctx, source, factor, norm, target, n, tag):  # type: ignore[no-untyped-def]
    """Emit target = source · factor · norm; norm is float32, source and target are of type `tag`."""
    return types.void(types.int64, types.float32, *[types.int64] * 3, tag), _calls(_WIDE_NORM)


@intrinsic
def gelu_row(typingctx, gate, up, target, n, tag):  # type: ignore[no-untyped-def]
    """Emit target = gelu(gate) · up with the tanh approximation of GELU; types are as in `gate_row`."""
    return types.void(*[types.int64] * 4, tag), _calls(_GELU_GATE)


@intrinsic
def cap_row(typingctx, y, factor, cap, n, tag):  # type: ignore[no-untyped-def]
    """Emit y = cap · tanh(y · factor) in float32; the tag must be that of float32."""
    return types.void(types.int64, types.float32, types.float32, types.int64, tag), _calls(_CAP)


@intrinsic
def gate_row(typingctx, gate, up, target, n, tag):  # type: ignore[no-untyped-def]
    """Emit target = silu(gate) · up; gate and up are float32, target is of type `tag`."""
    return types.void(*[types.int64] * 4, tag), _calls(_GATE)


@intrinsic
def soften_row(typingctx, y, scale, largest, n, tag):  # type: ignore[no-untyped-def]
    """Emit y = e^(y · scale - largest) in float32; the tag must be that of float32."""
    return types.void(types.int64, types.float32, types.float32, types.int64, tag), _calls(_SOFTEN)


@intrinsic
def combine_row(typingctx, y, kept, source, added, n, tag):  # type: ignore[no-untyped-def]
    """Emit y = y · kept + source · added in float32; the tag must be that of float32."""
    signature = types.void(types.int64, types.float32, types.int64, types.float32, types.int64, tag)
    return signature, _calls(_COMBINE)


def _reduction(start: float, combine: Callable[[Builder, Value, Value], Value]) -> Any:
    """Return an intrinsic (address, n) that combines `start` and n float32 into one number; n is a multiple of 16."""

    def codegen(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        address, n = args

        def body(i: Value, total: Value) -> list[Value]:
            return [combine(builder, total, load_vector(builder, at(builder, address, i, 4), types.float32))]

        totals = loop(builder, I64(0), n, LANES, [constant(VEC, start)], body)
        folded = fold(builder, totals, lambda a, b: combine(builder, a, b))
        return builder.extract_element(folded, I32(0))

    @intrinsic
    def reduction(typingctx, address, n):  # type: ignore[no-untyped-def]
        return types.float32(types.int64, types.int64), codegen

    return reduction


def _larger(builder: Builder, a: Value, b: Value) -> Value:
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


sum_of = _reduction(0.0, lambda builder, a, b: builder.fadd(a, b))
"""(address, n) → Σ of n float32; n a multiple of 16."""
max_of = _reduction(-1e30, _larger)
"""(address, n) → the largest of n float32 and -1e30; n a multiple of 16."""


@intrinsic
def squares_of(typingctx, address, n, tag):  # type: ignore[no-untyped-def]
    """Return the sum of the squares of n elements of type `tag`."""

    def codegen(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        (address, n, _), tag = args, signature.args[2]
        size, whole = tag_bytes(tag), builder.and_(args[1], I64(-LANES))

        def squares(fetch: Any) -> Callable[..., list[Value]]:
            def body(i: Value, total: Value) -> list[Value]:
                value = fetch(builder, at(builder, address, i, size), tag)
                return [multiply_add(builder, value, value, total)]

            return body

        totals = loop(builder, I64(0), whole, LANES, [constant(VEC, 0.0)], squares(load_vector))
        folded = builder.extract_element(fold(builder, totals, builder.fadd), I32(0))
        (total,) = loop(builder, whole, n, 1, [folded], squares(load_element))
        return total

    return types.float32(types.int64, types.int64, tag), codegen


@intrinsic
def load(typingctx, address, index, tag):  # type: ignore[no-untyped-def]
    """Load element `index` of the array at `address` as float32; `tag` is the type of its elements."""

    def codegen(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        place = at(builder, args[0], args[1], tag_bytes(signature.args[2]))
        return load_element(builder, place, signature.args[2])

    return types.float32(types.int64, types.int64, tag), codegen


@intrinsic
def store(typingctx, address, index, value, tag):  # type: ignore[no-untyped-def]
    """Store `value`, a float32, as element `index` of the array at `address`, whose elements have type `tag`.

    The value is rounded to nearest, ties to even.
    """

    def codegen(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        place = at(builder, args[0], args[1], tag_bytes(signature.args[3]))
        store_rounded(builder, place, args[2], signature.args[3])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, tag), codegen


@intrinsic
def load_int(typingctx, address, index, tag):  # type: ignore[no-untyped-def]
    """Load element `index` of the array at `address` as int64; `tag` is the type of its elements, int32 or int64."""

    def codegen(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        kind = I32 if signature.args[2] == types.int32 else I64
        place = at(builder, args[0], args[1], kind.width // 8)
        return builder.sext(builder.load(pointer(builder, place, kind)), I64)

    return types.int64(types.int64, types.int64, tag), codegen


@intrinsic
def exp(typingctx, x):  # type: ignore[no-untyped-def]
    """Return e^x of a float32, computed as in `ir.exponential`."""

    def codegen(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        return exponential(builder, args[0])

    return types.float32(types.float32), codegen


@intrinsic
def item_bytes(typingctx, tag):  # type: ignore[no-untyped-def]
    """Return the size of one element of type `tag` in bytes."""

    def codegen(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        return I64(tag_bytes(signature.args[0]))

    return types.int64(tag), codegen
