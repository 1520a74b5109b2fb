"""The last kernel of sampling, which chooses each row's token from the best logit, the weights and the candidates."""

import triton
import triton.language as tl

from tandem.engine.kernels.sampling.triton_sampling import (
    ALIGNED,
    CANDIDATES,
    MIN_P,
    ONE,
    PARAMS,
    SPLITS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNIFORM,
    best_of_row,
    count_drawn,
    is_filtered,
    token_or_none,
    units,
)
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs


@triton.jit
def choose(
    params_ptr,
    best_ptr,
    weights_ptr,
    ids_ptr,
    found_ptr,
    masses_ptr,
    counts_ptr,
    out_ptr,
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
    """Choose a row's token → out [rows] int64: the best if greedy, else a sample (by inverting the cumulative sum)."""
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    params_ptr += row * PARAMS
    token = token_or_none(best_of_row(best_ptr, row, blocks, BLOCKS))
    parts = tl.arange(0, SPLITS)
    masses = tl.load(masses_ptr + row * SPLITS + parts)
    total = tl.sum(masses, axis=0)
    # A row without a finite logit has no token: its weights are NaN, and the mass of NaN differs between devices.
    if (tl.load(params_ptr + TEMPERATURE) > 0) & (total > 0) & (token >= 0):
        weights_ptr += row * row_stride
        if is_filtered(params_ptr):
            token = _draw_filtered(
                params_ptr, weights_ptr, ids_ptr + row * CANDIDATES, found_ptr + row * 2, vocab, total, TILE, SHIFT
            )
        else:
            target = _share(tl.load(params_ptr + UNIFORM), total)
            before = tl.cumsum(masses, axis=0) - masses
            here = (before <= target) & (target < before + masses)
            first = tl.sum(tl.where(here, parts, 0), axis=0) * split_tokens
            rest = target - tl.sum(tl.where(here, before, 0), axis=0)
            length = tl.minimum(split_tokens, vocab - first)
            part_ptr = weights_ptr + CANDIDATES + first
            token = (first + _find(part_ptr, length, 0, ONE + 1, rest, False, TILE, SHIFT)).to(tl.int64)
    tl.store(out_ptr + row, token)
    if PENALTIES:
        count_drawn(counts_ptr, params_ptr, vocab, token)


@triton.jit
def _draw_filtered(params_ptr, weights_ptr, ids_ptr, found_ptr, vocab, total, TILE: tl.constexpr, SHIFT: tl.constexpr):
    """Sample from the tokens that the filters keep: the first ones by falling weight, and by rising id if equal."""
    top_k = tl.load(params_ptr + TOP_K).to(tl.int32)
    top_k = tl.where(top_k > 0, tl.minimum(top_k, vocab), vocab)
    top_p = tl.load(params_ptr + TOP_P)
    min_bits = tl.load(params_ptr + MIN_P).to(tl.float32).to(tl.int32, bitcast=True)
    candidates, surely = tl.load(found_ptr), tl.load(found_ptr + 1)
    _, candidate_mass = _measure(weights_ptr, candidates, 0, TILE, SHIFT)

    whole = top_k == vocab
    by_min_p = (min_bits >= surely) & ((top_p >= 1) | whole)
    by_top_p = whole & (top_p < 1) & (_mass_of(top_p, total) <= candidate_mass)
    # The candidates suffice if at least one filter is sure to cut within them; else the whole row is scanned.
    settled = (top_k <= candidates) | by_min_p | by_top_p
    weights_ptr += tl.multiple_of(tl.where(settled, 0, CANDIDATES), CANDIDATES)
    length = tl.where(settled, candidates, vocab)
    all_mass = tl.where(settled, candidate_mass, total)

    kept = all_mass
    if top_k < length:
        heavier, heavier_mass, token_mass, _, _ = _narrow(
            weights_ptr, length, all_mass, (top_k - 1).to(tl.int64), True, TILE, SHIFT
        )
        kept = heavier_mass + (top_k - heavier) * token_mass
    top_p_mass = _mass_of(top_p, tl.where(whole, total, kept))
    if min_bits > 0:
        _, mass = _measure(weights_ptr, length, min_bits, TILE, SHIFT)
        kept = tl.minimum(kept, mass)
    if (top_p < 1) & (top_p_mass < kept):
        _, heavier_mass, token_mass, _, _ = _narrow(weights_ptr, length, all_mass, top_p_mass - 1, False, TILE, SHIFT)
        equal = (top_p_mass - heavier_mass + token_mass - 1) // token_mass
        kept = tl.minimum(kept, heavier_mass + equal * token_mass)
    # The best token is kept by any filter.
    kept = tl.minimum(tl.maximum(kept, 1 << SHIFT), all_mass)

    target = _share(tl.load(params_ptr + UNIFORM), kept)
    _, heavier_mass, token_mass, low, high = _narrow(weights_ptr, length, all_mass, target, False, TILE, SHIFT)
    place = _find(weights_ptr, length, low, high, (target - heavier_mass) // token_mass, True, TILE, SHIFT)
    return tl.where(settled, tl.load(ids_ptr + place, mask=settled, other=0), place).to(tl.int64)


@triton.jit
def _share(number, mass):
    """Return number · mass, rounded down, for a number in [0, 1); the result is less than mass."""
    return tl.minimum((number * mass.to(tl.float64)).to(tl.int64), mass - 1)


@triton.jit
def _mass_of(top_p, mass):
    """Return the smallest mass that reaches the fraction top_p of `mass`."""
    return tl.maximum(tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _load(weights_ptr, place, length):
    """Load the weights at `place`, with 0 for places beyond `length` rounded up to a multiple of ALIGNED.

    The length is rounded up so that the mask does not prevent wide loads.
    """
    return tl.load(weights_ptr + place, mask=place < tl.cdiv(length, ALIGNED) * ALIGNED, other=0.0)


@triton.jit
def _measure(weights_ptr, length, least, TILE: tl.constexpr, SHIFT: tl.constexpr):
    """Return the number (int32) and the mass (int64) of the weights whose bits are at least `least` (int32).

    Only the first `length` weights are taken into account.
    """
    count = tl.zeros([TILE], dtype=tl.int32)
    mass = tl.zeros([TILE], dtype=tl.int64)
    start = 0
    while start < length:
        place = start + tl.arange(0, TILE)
        weights = _load(weights_ptr, place, length)
        taken = (place < length) & (weights.to(tl.int32, bitcast=True) >= least)
        count += taken.to(tl.int32)
        mass += tl.where(taken, units(weights, SHIFT), 0)
        start += TILE
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _narrow(weights_ptr, length, all_mass, target, BY_COUNT: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr):
    """Find the weight at which the running count or mass, in descending order of weight, first exceeds `target`.

    With BY_COUNT the count is compared, else the mass. The weights are not sorted: the search bisects over the float32
    bits, which are ordered like the weights. `target` is int64 and less than the total count or mass. Returns

    1. the number of tokens with bits ≥ high, that is, with a larger weight
    2. their mass
    3. the mass of one token with low ≤ bits < high
    4. low
    5. high

    All tokens with low ≤ bits < high have the same weight, or there is only one such token.
    """
    low, low_count, low_mass = 0, length, all_mass
    high, high_count, high_mass = ONE + 1, 0, all_mass * 0
    while (high - low > 1) & (low_count - high_count > 1):
        middle = (low + high) // 2
        count, mass = _measure(weights_ptr, length, middle, TILE, SHIFT)
        enough = (count.to(tl.int64) if BY_COUNT else mass) > target
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        low_count, high_count = tl.where(enough, count, low_count), tl.where(enough, high_count, count)
        low_mass, high_mass = tl.where(enough, mass, low_mass), tl.where(enough, high_mass, mass)
    return high_count, high_mass, (low_mass - high_mass) // (low_count - high_count), low, high


@triton.jit
def _find(weights_ptr, length, low, high, target, BY_COUNT: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr):
    """Return the first index whose running sum exceeds `target` (int64), over weights with bits low ≤ bits < high.

    With BY_COUNT each of these weights counts as one, else as its mass.
    """
    rest, left = target, target
    start, first = 0, 0
    while start < length:
        here = tl.sum(_amounts(weights_ptr, length, start, low, high, BY_COUNT, TILE, SHIFT), axis=0)
        hit = (rest >= 0) & (rest < here)
        first, left = tl.where(hit, start, first), tl.where(hit, rest, left)
        rest -= here
        start += TILE
    running = tl.cumsum(_amounts(weights_ptr, length, first, low, high, BY_COUNT, TILE, SHIFT), axis=0)
    return first + tl.min(tl.where(running > left, tl.arange(0, TILE), TILE - 1), axis=0)


@triton.jit
def _amounts(weights_ptr, length, start, low, high, BY_COUNT: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr):
    place = start + tl.arange(0, TILE)
    weights = _load(weights_ptr, place, length)
    bits = weights.to(tl.int32, bitcast=True)
    taken = (place < length) & (bits >= low) & (bits < high)
    if BY_COUNT:
        amounts = taken.to(tl.int64)
    else:
        amounts = tl.where(taken, units(weights, SHIFT), 0)
    return amounts
