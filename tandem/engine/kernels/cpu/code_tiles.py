"""Matrix products of packed weights and quantized activations, and the quantization of activations.

An activation is quantized in blocks of 32 columns: code = round(x · 127 / max|x|), scale = max|x| / 127. The products
of a block are exact integers. Blocks are added in float32 in the order of the columns, one weight row in each lane, so
a token's result does not depend on other tokens.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tandem.engine.kernels.cpu.integer_units import (
    INTS,
    LINE_BYTES,
    add_products,
    load_activation,
    load_weights,
    multiplies_bytes,
    splat_int,
    store_codes,
    unit_bytes,
)
from tandem.engine.kernels.cpu.ir import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    VEC,
    Builder,
    Function,
    Value,
    at,
    constant,
    load_element,
    load_vector,
    loop,
    multiply_add,
    nearest,
    pointer,
    prefetch,
    row_addresses,
    splat,
    steps,
    tag_bytes,
)
from tandem.engine.kernels.cpu.panel_weight import UNIT, WIDE_CENTRE
from tandem.engine.kernels.held_weight import CODES_A_BLOCK
from tandem.engine.kernels.packed_weight import CENTRE

AHEAD = 2048
"""Prefetch distance in bytes: while a line of a panel is read, the line this far after it is prefetched into L2."""
TOP_CODE = 127
UNITS_A_BLOCK = CODES_A_BLOCK // UNIT


def _code_tile(bits: int, offset: bool, tokens: int) -> Function:
    """Return a function that computes out[t][r] = Σ weight[r][i] · x[t][i] in float32 for a panel's sixteen rows r.

    Its arguments are (codes, scales, offsets, factors, x, x_stride, x_scales, x_sums, blocks, groups, blocks_a_group,
    out, out_stride). `x` points to codes, and x_stride is in bytes. x_scales (float32) and x_sums (int32) have an
    element for each block, `blocks` per token. If `scales` is 0, each row has a single scale, which is in `factors`.
    """
    centre = (0 if offset else CENTRE) if bits == 4 else WIDE_CENTRE
    lines = CODES_A_BLOCK * LANES * bits // 8 // LINE_BYTES

    def emit(builder: Builder, tag: Any, args: Any) -> None:
        codes, scales, offsets, factors, x, x_stride, x_scales, x_sums, blocks, groups, length, out, out_stride = args
        x_rows = row_addresses(builder, x, x_stride, tokens)
        stride = builder.mul(blocks, I64(4))
        scale_rows, sum_rows = (row_addresses(builder, array, stride, tokens) for array in (x_scales, x_sums))

        def group(g: Value, *totals: Value) -> list[Value]:
            first = builder.mul(g, length)
            row_scales = _load_scales(builder, scales, g, 1.0)
            row_offsets = _load_scales(builder, offsets, g, 0.0) if offset else None

            def block(b: Value, *totals: Value) -> list[Value]:
                sums = [builder.load(pointer(builder, at(builder, row, b, 4), I32), align=4) for row in sum_rows]
                products = [splat_int(builder, builder.mul(code_sum, I32(-centre))) for code_sum in sums]
                line_at = at(builder, codes, b, lines * LINE_BYTES)
                for line in range(lines):
                    place = builder.add(line_at, I64(line * LINE_BYTES))
                    prefetch(builder, builder.add(place, I64(AHEAD)))
                    units = load_weights(builder, place, bits)
                    for number, weights in enumerate(units):
                        unit = builder.add(builder.mul(b, I64(UNITS_A_BLOCK)), I64(line * len(units) + number))
                        for t in range(tokens):
                            activations = load_activation(builder, at(builder, x_rows[t], unit, unit_bytes()))
                            products[t] = add_products(builder, weights, activations, products[t])
                results = []
                for t in range(tokens):
                    x_scale = load_element(builder, at(builder, scale_rows[t], b, 4), types.float32)
                    scale = builder.fmul(row_scales, splat(builder, x_scale))
                    total = multiply_add(builder, builder.sitofp(products[t], VEC), scale, totals[t])
                    if row_offsets is not None:
                        x_sum = builder.fmul(builder.sitofp(sums[t], F32), x_scale)
                        total = multiply_add(builder, row_offsets, splat(builder, x_sum), total)
                    results.append(total)
                return results

            return loop(builder, first, builder.add(first, length), 1, list(totals), block)

        zeros = [constant(VEC, 0.0)] * tokens
        last = load_vector(builder, factors, types.float32)
        targets = row_addresses(builder, out, out_stride, tokens)
        for target, total in zip(targets, loop(builder, I64(0), groups, 1, zeros, group), strict=True):
            builder.store(builder.fmul(total, last), pointer(builder, target, VEC), align=4)

    return Function(f"codes{bits}{'o' if offset else ''}_{tokens}", emit)


def _load_scales(builder: Builder, address: Value, group: Value, otherwise: float) -> Value:
    """Load a group's sixteen float16 numbers as float32. If `address` is 0, return `otherwise` in every lane."""
    entry = builder.block
    with builder.if_then(builder.icmp_signed("!=", address, I64(0))):
        bits = builder.load(
            pointer(builder, at(builder, address, group, 2 * LANES), ir.VectorType(I16, LANES)), align=2
        )
        wide = builder.zext(bits, INTS)
        # The shifted bits are a float32 number whose exponent has the bias of float16. The factor 2^112 corrects the
        # bias, for subnormal numbers as well.
        size = builder.shl(builder.and_(wide, ir.Constant(INTS, [0x7FFF] * LANES)), ir.Constant(INTS, [13] * LANES))
        sign = builder.shl(builder.and_(wide, ir.Constant(INTS, [0x8000] * LANES)), ir.Constant(INTS, [16] * LANES))
        scaled = builder.fmul(builder.bitcast(size, VEC), constant(VEC, 2.0**112))
        loaded = builder.bitcast(builder.or_(builder.bitcast(scaled, INTS), sign), VEC)
        inside = builder.block
    result = builder.phi(VEC)
    result.add_incoming(constant(VEC, otherwise), entry)
    result.add_incoming(loaded, inside)
    return result


def _emit_code_rows(builder: Builder, tag: Any, args: Any) -> None:
    (bits, codes, scales, offsets, factors, first, panels, k, length, *rest) = args
    x, x_scales, x_sums, tokens, out, out_stride = rest
    blocks = builder.sdiv(k, I64(CODES_A_BLOCK))
    groups = builder.sdiv(blocks, length)
    x_stride = builder.mul(blocks, I64(UNITS_A_BLOCK * unit_bytes()))

    def variant(width: int, offset: bool) -> None:
        panel_bytes = builder.mul(k, I64(LANES * width // 8))

        def some_tokens(t: Value, count: int) -> None:
            xs = builder.add(x, builder.mul(t, x_stride))
            blocks_before = builder.mul(t, blocks)
            scale_at, sum_at = at(builder, x_scales, blocks_before, 4), at(builder, x_sums, blocks_before, 4)
            target = builder.add(out, builder.mul(t, out_stride))

            def panel(p: Value) -> list[Value]:
                row = builder.add(first, p)
                before = builder.mul(row, groups)
                some_scales = _unless_none(builder, scales, at(builder, scales, before, 2 * LANES))
                _CODE_TILES[width, offset, count].call(builder, tag, [
                    builder.add(codes, builder.mul(row, panel_bytes)), some_scales,
                    at(builder, offsets, before, 2 * LANES), at(builder, factors, row, LINE_BYTES), xs, x_stride,
                    scale_at, sum_at, blocks, groups, length, at(builder, target, p, LINE_BYTES), out_stride,
                ])  # fmt: skip
                return []

            loop(builder, I64(0), panels, 1, [], panel)

        steps(builder, tokens, _WIDTHS, some_tokens)

    with builder.if_else(builder.icmp_signed("==", bits, I64(4))) as (four, eight):
        for branch, width in ((four, 4), (eight, 8)):
            with branch, builder.if_else(builder.icmp_signed("!=", offsets, I64(0))) as (some, none):
                with some:
                    variant(width, offset=True)
                with none:
                    variant(width, offset=False)


def _unless_none(builder: Builder, address: Value, shifted: Value) -> Value:
    return builder.select(builder.icmp_signed("!=", address, I64(0)), shifted, I64(0))


def _emit_quantize(builder: Builder, tag: Any, args: Any) -> None:
    """Emit the body of `quantize_row`: it stores the codes, the scale and the sum of codes of each block of x."""
    x, codes, scales, sums, k = args

    def block(b: Value) -> list[Value]:
        place = at(builder, x, builder.mul(b, I64(CODES_A_BLOCK)), tag_bytes(tag))
        halves = [
            load_vector(builder, builder.add(place, I64(half * LANES * tag_bytes(tag))), tag) for half in range(2)
        ]
        # The bits of absolute values, read as integers, are ordered as the values are, and a NaN is above all numbers.
        sizes = [builder.and_(builder.bitcast(half, INTS), ir.Constant(INTS, [0x7FFFFFFF] * LANES)) for half in halves]
        larger = builder.select(builder.icmp_signed(">", *sizes), *sizes)
        largest = builder.bitcast(_reduce(builder, "smax", larger), F32)
        positive = builder.fcmp_ordered(">", largest, F32(0.0))
        inverse = builder.select(positive, builder.fdiv(F32(float(TOP_CODE)), largest), F32(0.0))
        scale = builder.fdiv(largest, F32(float(TOP_CODE)))
        code_halves = [_rounded(builder, builder.fmul(half, splat(builder, inverse))) for half in halves]
        target = at(builder, codes, b, UNITS_A_BLOCK * unit_bytes())
        for half, some in enumerate(code_halves):
            store_codes(builder, builder.add(target, I64(half * UNITS_A_BLOCK // 2 * unit_bytes())), some)
        builder.store(scale, pointer(builder, at(builder, scales, b, 4), F32), align=4)
        total = _reduce(builder, "add", builder.add(*code_halves))
        builder.store(total, pointer(builder, at(builder, sums, b, 4), I32), align=4)
        return []

    loop(builder, I64(0), builder.sdiv(k, I64(CODES_A_BLOCK)), 1, [], block)


def _rounded(builder: Builder, x: Value) -> Value:
    """Round sixteen float32 to int32; NaN, and numbers that round to a magnitude above TOP_CODE, become 0."""
    rounded = nearest(builder, x)
    inside = builder.and_(
        builder.fcmp_ordered("<=", rounded, constant(VEC, TOP_CODE)),
        builder.fcmp_ordered(">=", rounded, constant(VEC, -TOP_CODE)),
    )
    return builder.fptosi(builder.select(inside, rounded, constant(VEC, 0.0)), INTS)


def _reduce(builder: Builder, operation: str, vector: Value) -> Value:
    kind = ir.FunctionType(I32, [INTS])
    return builder.call(builder.module.declare_intrinsic(f"llvm.vector.reduce.{operation}.v16i32", fnty=kind), [vector])


_WIDTHS = (8, 4, 1) if multiplies_bytes() == "avx512vnni" else (4, 1)
"""The possible numbers of tokens of a tile: with AVX-512 VNNI there are enough registers for eight."""
_CODE_TILES = {
    (bits, offset, tokens): _code_tile(bits, offset, tokens)
    for bits in (4, 8)
    for offset in (False, True)
    for tokens in _WIDTHS
}
_CODE_ROWS = Function("code_rows", _emit_code_rows)
_QUANTIZE = Function("quantize", _emit_quantize)


@intrinsic
def code_rows(  # type: ignore[no-untyped-def]
    typingctx, bits, codes, scales, offsets, factors, first, panels, k, length, x, x_scales, x_sums, tokens, out,
    out_stride, tag,
):  # fmt: skip
    """Emit out[t][r] = w[r] · x[t] in float32, for `tokens` tokens and the rows of `panels` panels from `first` on.

    bits, codes, scales, offsets and factors are those of a `PanelWeight`; 0 stands for a tensor that the weight does
    not have. `length` is the number of blocks in a group. x, x_scales and x_sums are as `quantize_row` stores them, one
    token after another. out_stride is in bytes.
    """

    def codegen(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        _CODE_ROWS.call(builder, signature.args[-1], args[:-1])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 15, tag), codegen


@intrinsic
def quantize_row(typingctx, x, codes, scales, sums, k, tag):  # type: ignore[no-untyped-def]
    """Emit the quantization of k elements of type `tag` in blocks of 32; k is a multiple of 32.

    Stores codes in units of four as `integer_units.store_codes` lays them out, float32 scales, and the int32 sums of
    each block's codes.
    """

    def codegen(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        _QUANTIZE.call(builder, signature.args[-1], args[:-1])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, tag), codegen


@intrinsic
def row_code_bytes(typingctx, k):  # type: ignore[no-untyped-def]
    """Return the number of bytes that the codes of k quantized elements take."""

    def codegen(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        return builder.mul(args[0], I64(unit_bytes() // UNIT))

    return types.int64(types.int64), codegen
