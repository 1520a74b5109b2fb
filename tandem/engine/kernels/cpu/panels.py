"""Products of many tokens: weights repacked into panels, so that lanes are rows and no sum is folded.

A panel is packed once for all tokens of a step, in a thread's scratch memory: no second copy of the weights is kept.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tandem.engine.kernels.cpu.ir import (
    F32,
    I32,
    I64,
    LANES,
    VEC,
    Builder,
    Function,
    Value,
    at,
    load_vector,
    loop,
    multiply_add,
    pointer,
    row_addresses,
    splat,
    steps,
    tag_bytes,
)
from tandem.engine.kernels.cpu.tiles import BLOCK
from tandem.engine.kernels.cpu.units import (
    BFloatType,
    load_unit,
    load_units,
    multiplies_pairs,
    multiply_pairs,
    unit_bytes,
)


def _panel_tile(tokens: int) -> Function:
    """Returns a function with arguments (panel, x, x_stride, units, out, out_stride, more).

    It computes out[t][r] = Σ panel[u][r] · x[t][u] for 32 rows r. A unit is what one 32-bit lane multiplies: a float32,
    or a pair of bfloat16. With `more` != 0 the sums are added.
    """

    def emit(builder: Builder, tag: Any, args: Any) -> None:
        panel, x, x_stride, units, out, out_stride, more = args
        x_rows = row_addresses(builder, x, x_stride, tokens)
        pairs, size = multiplies_pairs(tag), unit_bytes(tag)
        packed = ir.VectorType(BFloatType(), 2 * LANES)

        def body(u: Value, *sums: Value) -> list[Value]:
            weights = at(builder, panel, u, PANEL_BYTES)
            ws = [load_vector(builder, builder.add(weights, I64(64 * half)), types.float32) for half in range(2)]
            xs = [splat(builder, load_unit(builder, at(builder, row, u, size), tag)) for row in x_rows]
            if pairs:
                ws, xs = [[builder.bitcast(each, packed) for each in both] for both in (ws, xs)]
            product = multiply_pairs if pairs else multiply_add
            return [product(builder, ws[half], xs[t], sums[2 * t + half]) for t in range(tokens) for half in range(2)]

        zeros = [ir.Constant(VEC, [0.0] * LANES)] * (2 * tokens)
        sums = loop(builder, I64(0), units, 1, zeros, body)
        targets = row_addresses(builder, out, out_stride, tokens)
        with builder.if_else(builder.icmp_signed("!=", more, I64(0))) as (then, otherwise):
            for branch, add in ((then, True), (otherwise, False)):
                with branch:
                    for number, total in enumerate(sums):
                        place = builder.add(targets[number // 2], I64(64 * (number % 2)))
                        before = load_vector(builder, place, types.float32) if add else None
                        value = builder.fadd(total, before) if add else total
                        builder.store(value, pointer(builder, place, VEC), align=4)

    return Function(f"panel_{tokens}", emit)


def _emit_pack(builder: Builder, tag: Any, args: Any) -> None:
    """Emits (w, w_stride, rows, panel, units): panel[u][r] = w[r][u] for 16 rows.

    Beyond `rows` the last is repeated.
    """
    w, w_stride, rows, panel, units = args
    last, size = builder.sub(rows, I64(1)), unit_bytes(tag)
    w_rows = []
    for row in range(LANES):
        inside = builder.icmp_signed("<", I64(row), rows)
        w_rows.append(builder.add(w, builder.mul(w_stride, builder.select(inside, I64(row), last))))

    def some_units(u: Value, width: int) -> None:
        places = [at(builder, row, u, size) for row in w_rows]
        target = at(builder, panel, u, PANEL_BYTES)
        if width == 1:
            for row, place in enumerate(places):
                lane = pointer(builder, builder.add(target, I64(4 * row)), F32)
                builder.store(load_unit(builder, place, tag), lane, align=4)
            return
        vectors = [load_units(builder, place, tag) for place in places]
        for step, vector in enumerate(_transpose(builder, vectors)):
            place = builder.add(target, I64(PANEL_BYTES * step))
            builder.store(vector, pointer(builder, place, VEC), align=4)

    steps(builder, units, (LANES, 1), some_units)


def _transpose(builder: Builder, vectors: list[Value]) -> list[Value]:
    """Transposes sixteen vectors of sixteen lanes by exchanging ever smaller halves."""
    step = LANES
    while step > 1:
        step //= 2
        lower = [lane if not lane & step else lane - step + LANES for lane in range(LANES)]
        upper = [lane + step if not lane & step else lane + LANES for lane in range(LANES)]
        kind = ir.VectorType(I32, LANES)
        exchanged = list(vectors)
        for first in (number for number in range(LANES) if not number & step):
            both = vectors[first], vectors[first + step]
            exchanged[first] = builder.shuffle_vector(*both, ir.Constant(kind, lower))
            exchanged[first + step] = builder.shuffle_vector(*both, ir.Constant(kind, upper))
        vectors = exchanged
    return vectors


def _emit_panel_rows(builder: Builder, tag: Any, args: Any) -> None:
    w, w_stride, rows, x, x_stride, tokens, k, panel, out, out_stride = args
    size, unit = tag_bytes(tag), unit_bytes(tag)
    block = PANEL_UNITS * unit // size

    def some_k(start: Value) -> list[Value]:
        left = builder.sub(k, start)
        n = builder.select(builder.icmp_signed("<", left, I64(block)), left, I64(block))
        units = builder.sdiv(builder.mul(n, I64(size)), I64(unit))
        ws = at(builder, w, start, size)
        upper = builder.sub(rows, I64(LANES))
        some = builder.icmp_signed(">", upper, I64(0))
        second = builder.select(some, builder.add(ws, builder.mul(w_stride, I64(LANES))), ws)
        _PACK.call(builder, tag, [ws, w_stride, rows, panel, units])
        upper_rows = builder.select(some, upper, rows)
        _PACK.call(builder, tag, [second, w_stride, upper_rows, builder.add(panel, I64(64)), units])

        def some_tokens(t: Value, width: int) -> None:
            xs = builder.add(at(builder, x, start, size), builder.mul(t, x_stride))
            target = builder.add(out, builder.mul(t, out_stride))
            _PANEL_TILES[width].call(builder, tag, [panel, xs, x_stride, units, target, out_stride, start])

        steps(builder, tokens, (BLOCK, 1), some_tokens)
        return []

    loop(builder, I64(0), k, block, [], some_k)


PANEL_ROWS = 2 * LANES
"""Weight rows of a panel."""
PANEL_BYTES = 4 * PANEL_ROWS
"""Bytes of a panel's unit over all its rows."""
PANEL_UNITS = 256
"""Maximum units of a panel: it stays in cache, and longer sums in one lane would round away what each unit adds."""
_PANEL_TILES = {tokens: _panel_tile(tokens) for tokens in (BLOCK, 1)}
_PACK = Function("pack", _emit_pack)
_PANEL_ROWS = Function("panel_rows", _emit_panel_rows)


@intrinsic
def panel_rows(typingctx, w, w_stride, rows, x, x_stride, tokens, k, panel, out, out_stride, tag):  # type: ignore[no-untyped-def]
    """Emits out[t][r] = w[r] · x[t] in float32, for up to 32 rows and many tokens of k `tag` elements, k even.

    Unlike `dot_rows` it repacks the weights into `panel` (32 KiB), so that lanes are rows and nothing is folded: faster
    from some dozens of tokens. All 32 outputs are written. Strides in bytes.
    """

    def codegen(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        _PANEL_ROWS.call(builder, signature.args[-1], args[:-1])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10, tag), codegen
