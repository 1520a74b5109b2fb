"""Register tiles of the CPU kernels: products of weights and tokens, keys and queries, values and attention weights.

`dot_rows` and `mix_rows` stream a matrix once for a few tokens. Every output is summed in a fixed order, which does not
depend on the other outputs. PyTorch computes products of many tokens (`long_products.py`).
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
    constant,
    fold,
    load_element,
    load_vector,
    loop,
    multiply_add,
    pointer,
    prefetch,
    row_addresses,
    splat,
    steps,
    tag_bytes,
)
from tandem.engine.kernels.cpu.units import (
    first_lanes,
    has_pair_products,
    has_wide_registers,
    load_masked,
    load_pairs,
    multiply_pairs,
)


def _dot_tile(rows: int, tokens: int) -> "Function":
    """Return a function that computes dot products; arguments: (w, w_stride, x, x_stride, k, out, out_stride, more).

    It computes out[t][r] = Σ w[r][i] · x[t][i] over i < k. w has `rows` rows and x `tokens` rows of elements of type
    `tag`, out is float32; strides are in bytes. If `more` is not 0 the sums are added to `out`. The weights two tiles
    ahead are prefetched into the L2 cache. Without the prefetch, the small number of concurrent L1 misses would limit
    reading to half of the memory's bandwidth for one row, and to a third for a wide tile.
    """

    def emit(builder: Builder, tag: Any, args: Any) -> None:
        w, w_stride, x, x_stride, k, out, out_stride, more = args
        size = tag_bytes(tag)
        w_rows = row_addresses(builder, w, w_stride, rows)
        x_rows = row_addresses(builder, x, x_stride, tokens)
        ahead = builder.mul(w_stride, I64(2 * rows))
        pairs = has_pair_products() and tag != types.float32
        step = 2 * LANES if pairs else LANES
        whole = builder.and_(k, I64(-step))

        def multiply(ws: list[Value], xs: list[Value], sums: tuple[Value, ...]) -> list[Value]:
            product = multiply_pairs if pairs else multiply_add
            return [product(builder, ws[r], xs[t], sums[t * rows + r]) for t in range(tokens) for r in range(rows)]

        def vectors(i: Value, *sums: Value) -> list[Value]:
            for row in w_rows:
                prefetch(builder, builder.add(at(builder, row, i, size), ahead))
            fetch = load_pairs if pairs else load_vector
            ws = [fetch(builder, at(builder, row, i, size), tag) for row in w_rows]
            xs = [fetch(builder, at(builder, row, i, size), tag) for row in x_rows]
            return multiply(ws, xs, sums)

        def last_vector(i: Value, *sums: Value) -> list[Value]:
            mask = first_lanes(builder, builder.sub(k, i), step)
            ws = [load_masked(builder, at(builder, row, i, size), mask, tag, pairs) for row in w_rows]
            xs = [load_masked(builder, at(builder, row, i, size), mask, tag, pairs) for row in x_rows]
            return multiply(ws, xs, sums)

        zeros = [ir.Constant(VEC, [0.0] * LANES)] * (rows * tokens)
        sums = loop(builder, I64(0), whole, step, zeros, vectors)
        folded = fold(builder, loop(builder, whole, k, step, sums, last_vector), builder.fadd)
        targets = row_addresses(builder, out, out_stride, tokens)
        with builder.if_else(builder.icmp_signed("!=", more, I64(0))) as (then, otherwise):
            with then:
                _store_sums(builder, folded, targets, rows, add=True)
            with otherwise:
                _store_sums(builder, folded, targets, rows, add=False)

    return Function(f"dot_{rows}x{tokens}", emit)


def _store_sums(builder: Builder, folded: Value, targets: list[Value], rows: int, add: bool) -> None:
    """Store `rows` lanes of `folded` in each target, or add them to the target if `add`."""
    kind = ir.VectorType(F32, rows)
    for t, target in enumerate(targets):
        lanes = ir.Constant(ir.VectorType(I32, rows), list(range(t * rows, (t + 1) * rows)))
        total = builder.shuffle_vector(folded, ir.Constant(folded.type, ir.Undefined), lanes)
        place = pointer(builder, target, kind)
        if add:
            total = builder.fadd(total, builder.load(place, align=4))
        builder.store(total, place, align=4)


def _mix_tile(tokens: int, vectors: int) -> "Function":
    """Return a function that adds weighted rows; its arguments are (v, v_stride, p, p_stride, n, out, out_stride).

    It computes out[t][d] += Σ p[t][j] · v[j][d] over j < n, for d < 16 · `vectors`. v has n rows of elements of type
    `tag`; p and out have `tokens` rows of float32; strides are in bytes.
    """

    def emit(builder: Builder, tag: Any, args: Any) -> None:
        v, v_stride, p, p_stride, n, out, out_stride = args
        step = LANES * tag_bytes(tag)
        p_rows = row_addresses(builder, p, p_stride, tokens)
        targets = [
            builder.add(row, I64(4 * LANES * d))
            for row in row_addresses(builder, out, out_stride, tokens)
            for d in range(vectors)
        ]

        def body(j: Value, *sums: Value) -> list[Value]:
            row = builder.add(v, builder.mul(j, v_stride))
            vs = [load_vector(builder, builder.add(row, I64(d * step)), tag) for d in range(vectors)]
            ps = [splat(builder, load_element(builder, at(builder, p_row, j, 4), types.float32)) for p_row in p_rows]
            return [
                multiply_add(builder, vs[d], ps[t], sums[t * vectors + d])
                for t in range(tokens)
                for d in range(vectors)
            ]

        zeros = [constant(VEC, 0.0)] * len(targets)
        for place, total in zip(targets, loop(builder, I64(0), n, 1, zeros, body), strict=True):
            longer = builder.fadd(load_vector(builder, place, types.float32), total)
            builder.store(longer, pointer(builder, place, VEC), align=4)

    return Function(f"mix_{tokens}x{vectors}", emit)


def _emit_dot_rows(builder: Builder, tag: Any, args: Any) -> None:
    w, w_stride, rows, x, x_stride, tokens, k, out, out_stride = args
    size = tag_bytes(tag)

    def block(start: Value) -> list[Value]:
        left = builder.sub(k, start)
        n = builder.select(builder.icmp_signed("<", left, I64(K_BLOCK)), left, I64(K_BLOCK))

        def some_tokens(t: Value, width: int) -> None:
            xs = builder.add(at(builder, x, start, size), builder.mul(t, x_stride))
            outs = builder.add(out, builder.mul(t, out_stride))
            tile_tokens = min(width, BLOCK if has_wide_registers() else _NARROW_BLOCK)

            def some_rows(r: Value, height: int) -> None:
                ws, target = builder.add(at(builder, w, start, size), builder.mul(r, w_stride)), at(builder, outs, r, 4)
                x_rows, targets = (
                    row_addresses(builder, base, stride, width)
                    for base, stride in ((xs, x_stride), (target, out_stride))
                )
                for first in range(0, width, tile_tokens):
                    places = [ws, w_stride, x_rows[first], x_stride, n, targets[first], out_stride, start]
                    _DOT_TILES[height, tile_tokens].call(builder, tag, places)

            steps(builder, rows, (_tile_rows(tile_tokens), 1), some_rows)

        steps(builder, tokens, (BLOCK, 4, 2, 1), some_tokens)
        return []

    loop(builder, I64(0), k, K_BLOCK, [], block)


def _tile_rows(tokens: int) -> int:
    """Return the number of weight rows in a tile of `tokens` tokens, such that the registers hold all sums."""
    if has_wide_registers():
        return 2 if tokens == BLOCK else 4
    return 2 if tokens == _NARROW_BLOCK else 4


def _emit_mix_rows(builder: Builder, tag: Any, args: Any) -> None:
    v, v_stride, n, p, p_stride, queries, out, out_stride, head_dim = args
    size = tag_bytes(tag)

    def block(j: Value) -> list[Value]:
        left = builder.sub(n, j)
        some = builder.select(builder.icmp_signed("<", left, I64(MIX_BLOCK)), left, I64(MIX_BLOCK))
        first_v, first_p = builder.add(v, builder.mul(j, v_stride)), at(builder, p, j, 4)

        def some_dims(d: Value, width: int) -> None:
            vs = at(builder, first_v, d, size)

            def some_queries(q: Value, height: int) -> None:
                ps = builder.add(first_p, builder.mul(q, p_stride))
                target = builder.add(at(builder, out, d, 4), builder.mul(q, out_stride))
                if width == 1:
                    _emit_mix_scalar(builder, tag, (vs, v_stride, some, ps, target))
                    return
                tile = _MIX_TILES[height, width // LANES]
                tile.call(builder, tag, [vs, v_stride, ps, p_stride, some, target, out_stride])

            steps(builder, queries, (1,) if width == 1 else (4, 1), some_queries)

        steps(builder, head_dim, (4 * LANES, LANES, 1), some_dims)
        return []

    loop(builder, I64(0), n, MIX_BLOCK, [], block)


def _emit_mix_scalar(builder: Builder, tag: Any, args: Any) -> None:
    v, v_stride, n, p, target = args

    def body(j: Value, total: Value) -> list[Value]:
        value = load_element(builder, builder.add(v, builder.mul(j, v_stride)), tag)
        return [multiply_add(builder, value, load_element(builder, at(builder, p, j, 4), types.float32), total)]

    (total,) = loop(builder, I64(0), n, 1, [F32(0.0)], body)
    total = builder.fadd(load_element(builder, target, types.float32), total)
    builder.store(total, pointer(builder, target, F32), align=4)


BLOCK = 8
"""Maximum number of tokens of a tile.

With two weight rows such a tile has sixteen sums, and ten loads keep the multipliers busy.
"""
_NARROW_BLOCK = 2
"""`BLOCK` without AVX-512, where a sum takes two or more of sixteen registers: four sums from eight loads."""
K_BLOCK = 768
"""Number of elements of a dot product that are summed at a time: those of eight tokens stay in the L1 cache."""
MIX_BLOCK = 32
"""Number of products that are summed in a lane before the sum is added to the output.

In a longer sum, each product would lose more digits to rounding.
"""
_DOT_TILES = {
    (rows, tokens): _dot_tile(rows, tokens)
    for rows, tokens in ((2, 8), (1, 8), (4, 4), (1, 4), (4, 2), (2, 2), (1, 2), (4, 1), (1, 1))
}
_MIX_TILES = {(tokens, vectors): _mix_tile(tokens, vectors) for tokens in (4, 1) for vectors in (4, 1)}
_DOT_ROWS = Function("dot_rows", _emit_dot_rows)
_MIX_ROWS = Function("mix_rows", _emit_mix_rows)


@intrinsic
def dot_rows(typingctx, w, w_stride, rows, x, x_stride, tokens, k, out, out_stride, tag):  # type: ignore[no-untyped-def]
    """Emit out[t][r] = w[r] · x[t] in float32; rows and tokens have k elements of type `tag`, strides are in bytes."""

    def codegen(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        _DOT_ROWS.call(builder, signature.args[-1], args[:-1])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9, tag), codegen


@intrinsic
def mix_rows(typingctx, v, v_stride, n, p, p_stride, queries, out, out_stride, head_dim, tag):  # type: ignore[no-untyped-def]
    """Emit out[q] += Σ p[q][j] · v[j] over n values of head_dim elements of type `tag`.

    p and out are float32; strides are in bytes.
    """

    def codegen(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        _MIX_ROWS.call(builder, signature.args[-1], args[:-1])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9, tag), codegen
