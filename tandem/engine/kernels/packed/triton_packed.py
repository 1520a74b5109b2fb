"""The kernels of `packed_products`: the product of some tokens and a weight's codes, and dequantization."""

import triton
import triton.language as tl

from tandem.engine.kernels.linear.triton_linear_kernels import GATE_UP, call_into_l2, finish_split, fold
from tandem.engine.kernels.packed.triton_codes import CENTRE, TILE, halves, in_column_order, in_word_order, words_as
from tandem.engine.kernels.packed.triton_float4 import float4_as, load_scale_words, scale_words
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs


@triton.jit
def words_at(rows_at, at, inside, EVEN: tl.constexpr):
    """Load words of codes [rows, words]; words for which `inside` is False are 0.

    EVEN: all words are inside. Then no mask is used, because a mask would make the loads narrow.
    """
    if EVEN:
        return tl.load(rows_at[:, None] + at[None, :], eviction_policy="evict_first")
    return tl.load(rows_at[:, None] + at[None, :], mask=inside[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def columns_of(start, K: tl.constexpr, BITS: tl.constexpr, FP4: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the column of each code in the COLUMNS bytes from `start` on, and a mask of the columns less than K."""
    BYTES: tl.constexpr = K * BITS // 8
    WIDTH: tl.constexpr = 64 if FP4 else TILE
    if BITS == 8 or (K // WIDTH * WIDTH == K and COLUMNS * 2 // WIDTH * WIDTH == COLUMNS * 2):
        at = start * 8 // BITS + tl.arange(0, COLUMNS * 8 // BITS)
        inside = at < K
    else:
        PART: tl.constexpr = COLUMNS if COLUMNS < WIDTH // 2 else WIDTH // 2
        number = tl.arange(0, COLUMNS * 2)
        held = start + number // (2 * PART) * PART + number % PART
        tile = held // (WIDTH // 2)
        half = tl.minimum(WIDTH, K - tile * WIDTH) // 2
        at = held + tile * (WIDTH // 2) + number % (2 * PART) // PART * half
        at = tl.max_contiguous(tl.multiple_of(at, 8), 8)  # promised to the compiler, so that loads are wide
        inside = held < BYTES
    return at, inside


@triton.jit
def add_step(
    sums, sums_up, totals, held, held_up, x, scales_at, up_scales_at, offsets_at, up_offsets_at, scale_words,
    up_scale_words, start, group_stride, word_stride,
    K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr, FP4: tl.constexpr,
    OFFSETS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Add the products of the tokens' columns x [tokens, columns] with words of codes → sums, sums_up, totals.

    The words `held` and, if PAIRED, `held_up` [rows, words] begin at byte `start` of their rows; the columns of x are
    those of `columns_of`. If each row has a single scale, the sums are not scaled yet; `totals` is the sum of x then,
    and `finish_sums` applies scale and offset. FP4 codes (FP4 is the size of their groups, or 0) are scaled here, by
    the words at `scale_words` and `up_scale_words`; then GROUP is K, and the scales are the factors of the rows.
    """
    ROWS: tl.constexpr = held.shape[0]
    PIECES: tl.constexpr = 2 if BITS == 4 and GROUP < K and GROUP // TILE * TILE != GROUP else 1
    x = in_word_order(x)
    weights = _weights(held, scale_words, start, word_stride, K, BITS, FP8, FP4, x.dtype)
    weights_up = weights
    if PAIRED:
        weights_up = _weights(held_up, up_scale_words, start, word_stride, K, BITS, FP8, FP4, x.dtype)
    first = start * 8 // BITS
    distance = 0
    if BITS == 4:
        tile = start // (TILE // 2)
        first = start + tile * (TILE // 2)
        distance = tl.minimum(TILE, K - tile * TILE) // 2
    ones = tl.full((ROWS, x.shape[1] // PIECES), 1.0, x.dtype)
    for piece in tl.static_range(PIECES):
        left, left_up, some = weights, weights_up, x
        if PIECES == 2:
            left, left_up, some = halves(left)[piece], halves(left_up)[piece], halves(some)[piece]
        right = tl.trans(some)
        if OFFSETS:
            # A product with ones gives the sum of x in the layout of the sums, into which tl.sum's result would have to
            # be moved.
            totals = tl.dot(ones, right, totals if GROUP == K else None, input_precision="ieee")
        group = tl.minimum((first + piece * distance) // GROUP, K // GROUP - 1) * group_stride
        sums = _add_products(sums, left, right, totals, scales_at + group, offsets_at + group, K, GROUP, BITS, OFFSETS)
        if PAIRED:
            sums_up = _add_products(
                sums_up, left_up, right, totals, up_scales_at + group, up_offsets_at + group, K, GROUP, BITS, OFFSETS
            )
    return sums, sums_up, totals


@triton.jit
def _weights(
    held, scale_words, start, word_stride,
    K: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr, FP4: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Convert words of codes [rows, words] to `dtype`; only FP4 codes are scaled."""
    if FP4:
        return float4_as(held, load_scale_words(scale_words, start, word_stride, K, FP4, held.shape[1] * 4), FP4, dtype)
    return words_as(held, BITS, FP8, dtype)


@triton.jit
def _add_products(
    sums, weights, right, totals, scales_at, offsets_at,
    K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    if GROUP == K:
        sums = tl.dot(weights, right, sums, input_precision="ieee")
    else:
        scale = tl.load(scales_at).to(tl.float32)
        sums += tl.dot(weights, right, input_precision="ieee") * scale[:, None]
        if OFFSETS:
            sums += _centred(tl.load(offsets_at), scale, BITS)[:, None] * totals
    return sums


@triton.jit
def finish_sums(
    sums, totals, scales_at, offsets_at,
    K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """Apply a row's single scale and offset to the sums [rows, tokens]; does nothing if each group has its own."""
    if GROUP == K:
        scale = tl.load(scales_at).to(tl.float32)
        sums *= scale[:, None]
        if OFFSETS:
            sums += _centred(tl.load(offsets_at), scale, BITS)[:, None] * totals
    return sums


@triton.jit
def _centred(offset, scale, BITS: tl.constexpr):
    """Return the offset as float32; with 4-bit codes, plus `CENTRE` · scale, because the codes are less by `CENTRE`."""
    return offset.to(tl.float32) + (CENTRE * scale if BITS == 4 else 0.0)


@triton.jit(do_not_specialize=["T"])
def packed_kernel(
    x,
    norm,
    codes,
    scales,
    offsets,
    words_of_scales,
    bias,
    out,
    partials,
    counters,
    T,
    N,
    eps,
    row_stride,
    group_stride,
    word_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FP8: tl.constexpr,
    FP4: tl.constexpr,
    OFFSETS: tl.constexpr,
    OP: tl.constexpr,
    GELU: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply some tokens by a packed weight; grid (ceil(N / ROWS), ceil(T / TOKENS), SPLITS).

    out [T, N]; x [T, K]; codes [N or, with GATE_UP, 2·N, K / 32 · BITS] words of int32. The scale and offset of row r
    and group g are at r · row_stride + g · group_stride. COLUMNS bytes of codes are read at a time; they share one
    scale, or, with 4-bit codes, two: one for the lower and one for the upper halves. The scales of FP4 codes are in
    `words_of_scales`, at r + word · word_stride, see `add_step`. partials and counters are as in `skinny_kernel`.
    """
    BYTES: tl.constexpr = K * BITS // 8
    STEPS: tl.constexpr = (BYTES + COLUMNS * SPLITS - 1) // (COLUMNS * SPLITS)
    EVEN: tl.constexpr = BYTES % (COLUMNS * SPLITS) == 0
    WIDTH: tl.constexpr = COLUMNS * 8 // BITS
    dtype: tl.constexpr = x.dtype.element_ty
    launch_dependents(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    held_rows = tl.minimum(rows, N - 1).to(tl.int64)
    up_rows = held_rows + N
    rows_at, up_rows_at = codes + held_rows * (BYTES // 4), codes + up_rows * (BYTES // 4)
    scales_at, up_scales_at = scales + held_rows * row_stride, scales + up_rows * row_stride
    offsets_at, up_offsets_at = offsets + held_rows * row_stride, offsets + up_rows * row_stride
    begin = split * (STEPS * COLUMNS)
    if EARLY:
        call_into_l2(rows_at, begin // 4, BYTES // 4, EARLY)
        if OP == GATE_UP:
            call_into_l2(up_rows_at, begin // 4, BYTES // 4, EARLY)
    if NORM:
        # Loaded once per token, so that no thread has to get its columns' factors from another thread.
        every = tl.zeros((TOKENS, 1), tl.int32)
        at, inside = columns_of(begin, K, BITS, FP4, COLUMNS)
        factor = tl.load(norm + (at[None, :] + every), mask=inside[None, :], other=0.0)
    wait_for_inputs(PDL)
    present = (tokens < T)[:, None]
    x_at = x + tokens.to(tl.int64)[:, None] * K
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    sums_up = tl.zeros((ROWS, TOKENS), tl.float32)
    totals = tl.zeros((ROWS, TOKENS), tl.float32)
    folded = tl.zeros((TOKENS, WIDTH // VECTOR), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        start = begin + step * COLUMNS
        words = start // 4 + tl.arange(0, COLUMNS // 4)
        held = words_at(rows_at, words, words < BYTES // 4, EVEN)
        held_up = held
        if OP == GATE_UP:
            held_up = words_at(up_rows_at, words, words < BYTES // 4, EVEN)
        at, inside = columns_of(start, K, BITS, FP4, COLUMNS)
        if EVEN:
            loaded = tl.load(x_at + at[None, :], mask=present, other=0.0)
        else:
            loaded = tl.load(x_at + at[None, :], mask=present & inside[None, :], other=0.0)
        if NORM:
            wide = loaded.to(tl.float32)
            folded += fold(wide * wide, VECTOR)
            loaded = (wide * factor.to(tl.float32)).to(dtype)
            # The load is issued one step ahead here: the compiler's pipeline would use shared memory for it.
            at, inside = columns_of(start + COLUMNS, K, BITS, FP4, COLUMNS)
            factor = tl.load(norm + (at[None, :] + every), mask=inside[None, :], other=0.0)
        sums, sums_up, totals = add_step(
            sums, sums_up, totals, held, held_up, loaded, scales_at, up_scales_at, offsets_at, up_offsets_at,
            words_of_scales + held_rows, words_of_scales + up_rows, start, group_stride, word_stride,
            K, GROUP, BITS, FP8, FP4, OFFSETS, OP == GATE_UP,
        )  # fmt: skip
    sums = finish_sums(sums, totals, scales_at, offsets_at, K, GROUP, BITS, OFFSETS)
    if OP == GATE_UP:
        sums_up = finish_sums(sums_up, totals, up_scales_at, up_offsets_at, K, GROUP, BITS, OFFSETS)
    squares = tl.sum(folded, axis=1)
    finish_split(
        sums, sums_up, squares, bias, out, partials, counters, rows, tokens, split, T, N, eps,
        K, OP, GELU, NORM, BIAS, ROWS, TOKENS, SPLITS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["N"])
def dequantize_kernel(
    codes, scales, offsets, words_of_scales, out, N,
    expert_stride, row_stride, group_stride, word_stride,
    K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr, FP4: tl.constexpr,
    OFFSETS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (part, rows, expert) dequantizes COLUMNS bytes of ROWS rows of weights [E, N, K], rounded once to `out`.

    The arguments are those of `packed_tile_kernel`; `step_bytes` bounds COLUMNS.
    """
    BYTES: tl.constexpr = K * BITS // 8
    # bfloat16 represents all codes, FP4 codes with their scales too, and has the faster conversion.
    EXACT: tl.constexpr = tl.bfloat16 if out.dtype.element_ty == tl.bfloat16 else tl.float32
    HALVES: tl.constexpr = 2 if BITS == 4 and not FP4 else 1
    start = tl.program_id(0) * COLUMNS
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(2).to(tl.int64)
    held_rows = tl.minimum(rows, N - 1)
    words = start // 4 + tl.arange(0, COLUMNS // 4)
    held = words_at(codes + (expert * N + held_rows) * (BYTES // 4), words, words < BYTES // 4, BYTES % COLUMNS == 0)
    scale_words_at = words_of_scales + expert * (word_stride * scale_words(K, FP4)) + held_rows
    weights = _weights(held, scale_words_at, start, word_stride, K, BITS, FP8, FP4, EXACT)
    weights = in_column_order(weights).to(tl.float32)
    tile = start // (TILE // 2)
    first = start + tile * (TILE // 2) if HALVES == 2 else start * 8 // BITS
    column = first + tl.arange(0, HALVES) * (tl.minimum(TILE, K - tile * TILE) // 2)
    group = tl.minimum(column // GROUP, K // GROUP - 1)
    place = expert * expert_stride + held_rows[:, None] * row_stride + group[None, :] * group_stride
    scale = tl.load(scales + place).to(tl.float32)
    weights *= _of_columns(scale, weights.shape[1])
    if OFFSETS:
        weights += _of_columns(_centred(tl.load(offsets + place), scale, BITS), weights.shape[1])
    at, inside = columns_of(start, K, BITS, FP4, COLUMNS)
    out_at = out + ((expert * N + rows) * K)[:, None] + at[None, :]
    tl.store(out_at, weights.to(out.dtype.element_ty), mask=(rows < N)[:, None] & inside[None, :])


@triton.jit
def _of_columns(values, COLUMNS: tl.constexpr):
    """Repeat values [rows, n], each for COLUMNS / n adjacent columns → [rows, COLUMNS]."""
    ROWS: tl.constexpr = values.shape[0]
    PARTS: tl.constexpr = values.shape[1]
    return tl.reshape(tl.broadcast_to(values[:, :, None], (ROWS, PARTS, COLUMNS // PARTS)), (ROWS, COLUMNS))
