"""Sampling in four kernels that never wait for the host: best logits, weights, candidates, choice.

A token's weight is exp((logit - best) / temperature), in (0, 1]. Two properties make the choice exact without a sort,
and independent of the order of summation:

- A weight's float bits, as an integer, grow with the weight, so the weight at a position in the order of the filters
  (falling weight, then rising id) is found by bisection over the bits.
- Masses are summed as integers, in units of 2**-shift.

Filters are applied to the most likely tokens, which `collect` gathers, or to the whole row if more tokens may be kept.
`tandem.engine.cuda.sampler_cuda` owns the scratch memory and launches the kernels.
"""

import triton
import triton.language as tl

from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs

TEMPERATURE, TOP_K, TOP_P, MIN_P = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
UNIFORM, REPETITION, PRESENCE, FREQUENCY = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
COUNTED = tl.constexpr(8)
PARAMS = tl.constexpr(9)
"""Number of float64 parameters of a row. COUNTED is the row's index in the counts, -1 if the row has no penalties."""
IN_PROMPT = tl.constexpr(1 << 30)
"""Number that is added to the count of a token in the prompt, which only the repetition penalty takes into account."""
CANDIDATES = tl.constexpr(4096)
"""Maximum number of candidates that are gathered; if a row's filters keep more tokens, its whole row is scanned."""
ALIGNED = tl.constexpr(16)
"""A row's scratch memory starts and ends at multiples of this number of weights, so that loads are wide."""
SPLITS = tl.constexpr(16)
"""Number of parts of a row; separate programs compute the weights, and gather the candidates, of each part."""
BINS = tl.constexpr(256)
"""Number of bins in the histogram of the weights of a part of a row.

There are eight bins per factor of two, from weight 1 downwards; bin 0 holds all lighter weights.
"""
BIN_SHIFT = tl.constexpr(20)
"""Number of bits of a float32 below its sign, its exponent and the first three bits of its mantissa."""
ONE = tl.constexpr(0x3F800000)
"""The bits of the largest weight, 1.0."""
BELOW_BINS = tl.constexpr((0x3F800000 >> 20) - 255)
LEAST_TEMPERATURE = tl.constexpr(1e-30)
LOG2_E = tl.constexpr(1.4426950408889634)
LOW_HALF = tl.constexpr(0x7FFFFFFF)
NO_TOKEN = tl.constexpr(-1)
"""The constant `tandem.engine.steps.sampling_metadata.NO_TOKEN` for kernels."""


@triton.jit
def load_logits(logits_ptr, counts_ptr, params_ptr, vocab, column, inside, PENALTIES: tl.constexpr):
    """Load a row's logits at `column` as float32, with penalties applied; -inf outside of the row."""
    logits = tl.load(logits_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
    if PENALTIES:
        counted = tl.load(params_ptr + COUNTED).to(tl.int64)
        count = tl.load(counts_ptr + counted * vocab + column, mask=inside & (counted >= 0), other=0)
        drawn = (count & (IN_PROMPT - 1)).to(tl.float32)
        repetition = tl.load(params_ptr + REPETITION).to(tl.float32)
        presence = tl.load(params_ptr + PRESENCE).to(tl.float32)
        frequency = tl.load(params_ptr + FREQUENCY).to(tl.float32)
        repeated = tl.where(logits > 0, logits / repetition, logits * repetition)
        logits = tl.where(count > 0, repeated, logits)
        logits = logits - frequency * drawn - tl.where(drawn > 0, presence, 0.0)
    return logits


@triton.jit
def pack(logit, token):
    """Return an int64 that is larger for a larger logit, and for the lower token among equal logits."""
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & LOW_HALF)
    return (ordered.to(tl.int64) << 32) | (token ^ LOW_HALF).to(tl.int64)


@triton.jit
def unpack_logit(packed):
    """Return the float32 logit that `pack` packed."""
    ordered = (packed >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & LOW_HALF)).to(tl.float32, bitcast=True)


@triton.jit
def unpack_token(packed):
    """Return the token that `pack` packed, as int64."""
    return (packed & LOW_HALF) ^ LOW_HALF


@triton.jit
def token_or_none(best):
    """Return the token of a row's packed best logit, or NO_TOKEN if that logit is not finite; int64."""
    return tl.where(tl.abs(unpack_logit(best)) < float("inf"), unpack_token(best), NO_TOKEN)


@triton.jit
def best_of_block(
    logits_ptr,
    logits_stride,
    counts_ptr,
    params_ptr,
    best_ptr,
    vocab,
    BLOCK: tl.constexpr,
    PENALTIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the packed best logit of BLOCK tokens of a row → best [rows, blocks] int64; NaN counts as infinity."""
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    logits = load_logits(
        logits_ptr + row * logits_stride,
        counts_ptr,
        params_ptr + row * PARAMS,
        vocab,
        column,
        column < vocab,
        PENALTIES,
    )
    # A maximum may ignore NaN, but not infinity.
    logits = tl.where(logits < float("inf"), logits, float("inf"))
    best = tl.max(logits, axis=0)
    token = tl.min(tl.where(logits == best, column, LOW_HALF), axis=0)
    tl.store(best_ptr + row * tl.num_programs(1) + block, pack(best, token))


@triton.jit
def best_of_row(best_ptr, row, blocks, BLOCKS: tl.constexpr):
    """Return the packed best logit of a row, from those of its `blocks` ≤ BLOCKS blocks."""
    block = tl.arange(0, BLOCKS)
    partial = tl.load(best_ptr + row * blocks + block, mask=block < blocks, other=-(1 << 63))
    return tl.max(partial, axis=0)


@triton.jit
def take_best(
    best_ptr,
    out_ptr,
    counts_ptr,
    params_ptr,
    blocks,
    vocab,
    BLOCKS: tl.constexpr,
    PENALTIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the token of each row's best logit → out [rows] int64; used if all rows of the step are greedy."""
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = token_or_none(best_of_row(best_ptr, row, blocks, BLOCKS))
    tl.store(out_ptr + row, token)
    if PENALTIES:
        count_drawn(counts_ptr, params_ptr + row * PARAMS, vocab, token)


@triton.jit
def count_drawn(counts_ptr, params_ptr, vocab, token):
    """Count the sampled token of a row with penalties; no other program accesses the row's counts."""
    counted = tl.load(params_ptr + COUNTED).to(tl.int64)
    if (counted >= 0) & (token >= 0):
        count_ptr = counts_ptr + counted * vocab + token
        tl.store(count_ptr, tl.load(count_ptr) + 1)


@triton.jit
def is_filtered(params_ptr):
    """Return True if a row has a filter: its token is then sampled in the order of falling weight."""
    top_k, top_p, min_p = tl.load(params_ptr + TOP_K), tl.load(params_ptr + TOP_P), tl.load(params_ptr + MIN_P)
    return (top_k > 0) | (top_p < 1) | (min_p > 0)


@triton.jit
def units(weights, SHIFT: tl.constexpr):
    """Return weights as integers, in units of 2**-SHIFT."""
    return (weights * (2.0**SHIFT)).to(tl.int64)


@triton.jit
def bin_of(weights):
    """Return the histogram bin of each weight; the heaviest weights are in the last bin."""
    return tl.maximum((weights.to(tl.int32, bitcast=True) >> BIN_SHIFT) - BELOW_BINS, 0)


@triton.jit
def weigh(
    logits_ptr,
    logits_stride,
    counts_ptr,
    params_ptr,
    best_ptr,
    weights_ptr,
    masses_ptr,
    histograms_ptr,
    vocab,
    blocks,
    row_stride,
    split_tokens,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    SHIFT: tl.constexpr,
    PENALTIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a part of a row: its weights, their mass and, if the row is filtered, their histogram.

    weights [rows, row_stride] float32: the first CANDIDATES columns are left for `collect`, and a row's weights follow;
    masses [rows, SPLITS] int64; histograms [rows, SPLITS, BINS] int32.
    """
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    params_ptr += row * PARAMS
    temperature = tl.load(params_ptr + TEMPERATURE).to(tl.float32)
    if tl.load(params_ptr + TEMPERATURE) > 0:
        temperature = tl.maximum(temperature, LEAST_TEMPERATURE)
        filtered = is_filtered(params_ptr)
        best = unpack_logit(best_of_row(best_ptr, row, blocks, BLOCKS))
        mass = tl.zeros([TILE], dtype=tl.int64)
        histogram = tl.zeros([BINS], dtype=tl.int32)
        start = split * split_tokens
        end = tl.minimum(start + split_tokens, vocab)
        while start < end:
            column = start + tl.arange(0, TILE)
            inside = column < vocab
            logits = load_logits(
                logits_ptr + row * logits_stride, counts_ptr, params_ptr, vocab, column, inside, PENALTIES
            )
            weights = tl.exp2((logits - best) / temperature * LOG2_E)
            # NaN has the weight 0. The minimum is needed because two kernels may round a penalised best logit
            # differently.
            weights = tl.where(weights >= 0, tl.minimum(weights, 1.0), 0.0)
            tl.store(weights_ptr + row * row_stride + CANDIDATES + column, weights, mask=inside)
            mass += units(weights, SHIFT)
            if filtered:
                histogram += tl.histogram(bin_of(weights), BINS, mask=inside)
            start += TILE
        part = row * SPLITS + split
        tl.store(masses_ptr + part, tl.sum(mass, axis=0))
        if filtered:
            tl.store(histograms_ptr + part * BINS + tl.arange(0, BINS), histogram)


@triton.jit
def collect(
    params_ptr,
    weights_ptr,
    ids_ptr,
    found_ptr,
    histograms_ptr,
    vocab,
    row_stride,
    split_tokens,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gather the candidates in one part of a filtered row: the tokens of as many of the heaviest bins as fit.

    Stores the candidates' weights at the start of the row's scratch memory and their ids [rows, CANDIDATES] int32, both
    by rising id. found [rows, 2] int32 gets the number of candidates, and the bits of a weight such that all tokens of
    at least this weight are candidates.
    """
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    params_ptr += row * PARAMS
    if (tl.load(params_ptr + TEMPERATURE) > 0) & is_filtered(params_ptr):
        part, bins = tl.arange(0, SPLITS)[:, None], tl.arange(0, BINS)[None, :]
        histograms = tl.load(histograms_ptr + (row * SPLITS + part) * BINS + bins)
        at_least = tl.cumsum(tl.sum(histograms, axis=0), axis=0, reverse=True)
        cut = tl.min(tl.where(at_least <= CANDIDATES, tl.arange(0, BINS), BINS), axis=0)
        place = tl.sum(tl.sum(tl.where((part < split) & (bins >= cut), histograms, 0), axis=1), axis=0)
        if split == 0:
            count = tl.sum(tl.sum(tl.where(bins >= cut, histograms, 0), axis=1), axis=0)
            tl.store(found_ptr + row * 2, count)
            tl.store(found_ptr + row * 2 + 1, tl.where(cut == 0, 0, (cut + BELOW_BINS) << BIN_SHIFT))
        start = split * split_tokens
        end = tl.minimum(start + split_tokens, vocab)
        while start < end:
            column = start + tl.arange(0, TILE)
            inside = column < vocab
            weights = tl.load(weights_ptr + row * row_stride + CANDIDATES + column, mask=inside, other=0.0)
            taken = (inside & (bin_of(weights) >= cut)).to(tl.int32)
            places = place + tl.cumsum(taken, axis=0) - 1
            tl.store(weights_ptr + row * row_stride + places, weights, mask=taken > 0)
            tl.store(ids_ptr + row * CANDIDATES + places, column, mask=taken > 0)
            place += tl.sum(taken, axis=0)
            start += TILE
