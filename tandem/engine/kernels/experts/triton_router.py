"""The router of a mixture of experts: its product, the choice of experts, and the list of each expert's tokens.

The product multiplies in the model's dtype and sums in float32; the logits stay float32. A program of the choice kernel
chooses for a few tokens. If one program can hold the whole step, the program also lists each expert's tokens. Else the
programs count each expert's tokens with integer atomics, and a second kernel makes the list, with one program per
expert. The list is in the order of the tokens, so the results do not depend on the order in which programs run.

A pair is one token and one of its experts; it has the number token · top_k + rank. A tile is `tokens` entries of the
list, all of one expert; the last tile of an expert is partly empty. tiles [max_tiles + 1] int32 holds for each tile
expert · 256 + its number of pairs, and at the end the number of tiles.
"""

import triton
import triton.language as tl

from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs

SOFTMAX = tl.constexpr(0)
SIGMOID = tl.constexpr(1)
SOFTMAX_OF_TOP_K = tl.constexpr(2)
SCORES = {"softmax": SOFTMAX.value, "sigmoid": SIGMOID.value, "softmax_of_top_k": SOFTMAX_OF_TOP_K.value}
"""The values of `ExpertRouter.score`."""

CHOOSE = tl.constexpr(0)
COUNT = tl.constexpr(1)
SORT = tl.constexpr(2)
"""The tasks of the choice kernel: choose, choose and count each expert's tokens, or choose, count and sort."""

PAIRS_BASE = tl.constexpr(256)
"""Base of an entry of `tiles`, which is expert · PAIRS_BASE + the tile's number of pairs."""

_LOWEST = tl.constexpr(-1e30)
"""The score of experts that may be chosen only after all others; experts that are already chosen have -inf."""


@triton.jit(do_not_specialize=["T"])
def router_kernel(
    hidden, norm, router, x, logits, counts, T, eps,
    H: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr, SPLITS: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, ZEROED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the router's logits; grid (ceil(E / EXPERTS), ceil(T / TOKENS), SPLITS).

    hidden [T, H], router [E, H], logits [SPLITS, T, E] float32, each a partial sum over some of the columns.

    With NORM it also computes x [T, H] = RMSNorm(hidden); without, x is the input. The first program zeroes counts
    [ZEROED], to which `choice_kernel` then adds.
    """
    STEPS: tl.constexpr = (H + COLUMNS * SPLITS - 1) // (COLUMNS * SPLITS)
    launch_dependents(PDL)
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    columns = tl.arange(0, COLUMNS)
    present = (tokens < T)[:, None]
    row_at = tokens.to(tl.int64)[:, None] * H
    router_at = router + tl.minimum(experts, E - 1)[:, None] * H
    wait_for_inputs(PDL)
    if tl.program_id(0) + tl.program_id(1) + split == 0:
        tl.store(counts + tl.arange(0, ZEROED), tl.zeros((ZEROED,), tl.int32))
    factor = tl.zeros((TOKENS,), tl.float32)
    if NORM:
        squares = tl.zeros((TOKENS, COLUMNS), tl.float32)
        for k in tl.range(0, H, COLUMNS):
            at = k + columns
            wide = tl.load(hidden + row_at + at[None, :], mask=present & (at < H)[None, :], other=0.0).to(tl.float32)
            squares += wide * wide
        factor = tl.rsqrt(tl.sum(squares, axis=1) / H + eps)
    sums = tl.zeros((EXPERTS, TOKENS), tl.float32)
    for step in tl.range(0, STEPS):
        at = (split * STEPS + step) * COLUMNS + columns
        inside = (at < H)[None, :]
        held = tl.load(router_at + at[None, :], mask=inside, other=0.0)
        if NORM:
            wide = tl.load(hidden + row_at + at[None, :], mask=present & inside, other=0.0).to(tl.float32)
            scale = tl.load(norm + at, mask=at < H, other=0.0).to(tl.float32)
            normed = (wide * factor[:, None] * scale[None, :]).to(x.dtype.element_ty)
            if tl.program_id(0) == 0:
                tl.store(x + row_at + at[None, :], normed, mask=present & inside)
        else:
            normed = tl.load(x + row_at + at[None, :], mask=present & inside, other=0.0)
        sums = tl.dot(held, tl.trans(normed), sums, input_precision="ieee")
    logits_at = logits + (split * T + tokens).to(tl.int64)[None, :] * E + experts[:, None]
    tl.store(logits_at, sums, mask=(experts < E)[:, None] & (tokens < T)[None, :])


@triton.jit
def _scores(total, real, SCORE: tl.constexpr):
    """Return the scores of logits [tokens, lanes]; only the lanes in the mask `real` are experts."""
    wide = tl.where(real & (total >= _LOWEST), total, _LOWEST)
    if SCORE == SOFTMAX:
        parts = tl.where(real, tl.exp(wide - tl.max(wide, axis=1)[:, None]), 0.0)
        wide = parts / tl.sum(parts, axis=1)[:, None]
    if SCORE == SIGMOID:
        # Of the two forms of the sigmoid, use the one whose exponential cannot overflow.
        small = tl.exp(-tl.abs(wide))
        wide = tl.where(wide >= 0, 1.0, small) / (1.0 + small)
    return wide


@triton.jit
def _within_groups(
    ranked, TOKENS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_2_SUM: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Return ranked scores [tokens, lanes], with `_LOWEST` for experts outside of each token's best groups."""
    by_group = tl.reshape(ranked, (TOKENS, BLOCK_G, BLOCK_S))
    best, at = tl.max(by_group, axis=2, return_indices=True)
    if TOP_2_SUM:
        taken = tl.arange(0, BLOCK_S)[None, None, :] == at[:, :, None]
        best += tl.max(tl.where(taken, float("-inf"), by_group), axis=2)
    groups = tl.arange(0, BLOCK_G)[None, :]
    kept = tl.zeros((TOKENS, BLOCK_G), tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        hit = groups == tl.argmax(best, axis=1)[:, None]
        kept = tl.where(hit, 1, kept)
        best = tl.where(hit, float("-inf"), best)
    lowered = tl.where(kept[:, :, None] > 0, by_group, _LOWEST)
    return tl.reshape(lowered, (TOKENS, BLOCK_G * BLOCK_S))


@triton.jit(do_not_specialize=["T", "MAX_TILES"])
def choice_kernel(
    logits, router_bias, choice_bias, scales, slots, weights, chosen, counts, used, tiles, pairs, T, MAX_TILES, scaling,
    E: tl.constexpr, FIRST: tl.constexpr, LOCAL: tl.constexpr,
    TOP_K: tl.constexpr, SPLITS: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_2_SUM: tl.constexpr,
    BIAS: tl.constexpr, CHOICE_BIAS: tl.constexpr, SCALED: tl.constexpr, COUNTED: tl.constexpr,
    TASK: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the experts of TOKENS tokens; grid (ceil(T / TOKENS),); with SORT there is only one program.

    weights [T · TOP_K] float32 and chosen [T · TOP_K] int32 are stored; chosen is -1 for padding tokens. The number of
    tokens that chose each expert is added to counts [E] int32 if TASK is COUNT, and to used [E] int64 if COUNTED. With
    SORT tiles and pairs are stored as in the module's docstring. If SCALED, weights are multiplied by their experts'
    numbers in scales [E] float32. Lanes are experts by group, with padding after each group.

    If this rank has the weights of only LOCAL of the E experts, from number FIRST on, chosen, counts and tiles count
    the experts from FIRST, and chosen is -1 for the experts of other ranks.
    """
    SIZE: tl.constexpr = E // GROUPS
    LANES: tl.constexpr = BLOCK_G * BLOCK_S
    launch_dependents(PDL)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    lanes = tl.arange(0, LANES)
    expert = (lanes // BLOCK_S) * SIZE + lanes % BLOCK_S
    is_expert = (lanes // BLOCK_S < GROUPS) & (lanes % BLOCK_S < SIZE)
    present = tokens < T
    loaded = present[:, None] & is_expert[None, :]
    wait_for_inputs(PDL)
    slot = tl.load(slots + tokens, mask=present, other=-1)
    total = tl.zeros((TOKENS, LANES), tl.float32)
    for split in tl.static_range(SPLITS):
        row = (split * T + tokens).to(tl.int64)
        total += tl.load(logits + row[:, None] * E + expert[None, :], mask=loaded, other=0.0)
    if BIAS:
        total += tl.load(router_bias + expert, mask=is_expert, other=0.0).to(tl.float32)[None, :]
    scores = _scores(total, is_expert[None, :], SCORE)
    ranked = scores
    if CHOICE_BIAS:
        ranked += tl.load(choice_bias + expert, mask=is_expert, other=0.0)[None, :]
    # A score may be NaN, as the memory of padding tokens is arbitrary: any expert will do, but it must exist.
    ranked = tl.where(ranked >= _LOWEST, ranked, _LOWEST)
    ranked = tl.where(is_expert[None, :], ranked, float("-inf"))
    if GROUPS > 1:
        ranked = _within_groups(ranked, TOKENS, TOP_GROUPS, TOP_2_SUM, BLOCK_G, BLOCK_S)
        ranked = tl.where(is_expert[None, :], ranked, float("-inf"))
    ranks = tl.arange(0, BLOCK_K)[None, :]
    chosen_scores = tl.zeros((TOKENS, BLOCK_K), tl.float32)
    numbers = tl.zeros((TOKENS, BLOCK_K), tl.int32)
    rank_of = tl.full((TOKENS, LANES), -1, tl.int32)
    for rank in tl.range(0, TOP_K):
        hit = lanes[None, :] == tl.argmax(ranked, axis=1)[:, None]
        ranked = tl.where(hit, float("-inf"), ranked)
        rank_of = tl.where(hit, rank, rank_of)
        value = tl.sum(tl.where(hit, scores, 0.0), axis=1)
        number = tl.sum(tl.where(hit, expert[None, :], 0), axis=1)
        chosen_scores = tl.where(ranks == rank, value[:, None], chosen_scores)
        numbers = tl.where(ranks == rank, number[:, None], numbers)
    is_rank = ranks < TOP_K
    if SCORE == SOFTMAX_OF_TOP_K:
        highest = tl.max(tl.where(is_rank, chosen_scores, _LOWEST), axis=1)
        chosen_scores = tl.where(is_rank, tl.exp(chosen_scores - highest[:, None]), 0.0)
    if RENORMALIZE or SCORE == SOFTMAX_OF_TOP_K:
        total_of = tl.sum(tl.where(is_rank, chosen_scores, 0.0), axis=1)[:, None]
        chosen_scores = chosen_scores / tl.where(total_of > 0, total_of, 1.0)
    if SCALED:
        chosen_scores *= tl.load(scales + numbers)
    pair = tokens[:, None] * TOP_K + ranks
    valid = present & (slot >= 0)
    own_numbers, own_expert = numbers, expert
    kept, hot = valid[:, None] & is_rank, (rank_of >= 0) & valid[:, None]
    if LOCAL < E:
        own_numbers, own_expert = numbers - FIRST, expert - FIRST
        kept &= (own_numbers >= 0) & (own_numbers < LOCAL)
        hot &= ((own_expert >= 0) & (own_expert < LOCAL))[None, :]
    tl.store(weights + pair, chosen_scores * scaling, mask=present[:, None] & is_rank)
    tl.store(chosen + pair, tl.where(kept, own_numbers, -1), mask=present[:, None] & is_rank)
    if COUNTED:
        counting = valid[:, None] & is_rank
        tl.atomic_add(used + numbers, tl.full((TOKENS, BLOCK_K), 1, tl.int64), mask=counting, sem="relaxed")
    if TASK == COUNT:
        tl.atomic_add(counts + own_numbers, tl.full((TOKENS, BLOCK_K), 1, tl.int32), mask=kept, sem="relaxed")
    if TASK == SORT:
        ones = hot.to(tl.int32)
        # The program holds all tokens of the step, so a prefix sum over the tokens gives each pair's position in its
        # expert's list, and the list is in the order of the tokens.
        before = tl.cumsum(ones, axis=0) - ones
        count = tl.sum(ones, axis=0)
        tiles_of = (count + TILE - 1) // TILE
        first = tl.cumsum(tiles_of, axis=0) - tiles_of
        tl.store(tiles + MAX_TILES, tl.sum(tiles_of, axis=0))
        for number in tl.static_range((TOKENS + TILE - 1) // TILE):
            left = count - number * TILE
            tl.store(tiles + first + number, own_expert * PAIRS_BASE + tl.minimum(left, TILE), mask=left > 0)
        place = first[None, :] * TILE + before
        tl.store(pairs + place, tokens[:, None] * TOP_K + rank_of, mask=hot)


@triton.jit(do_not_specialize=["P", "MAX_TILES"])
def sort_kernel(
    chosen, counts, tiles, pairs, P, MAX_TILES,
    E: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """List the tiles and pairs of one expert; grid (E,).

    chosen [P] and counts [E] are those of `choice_kernel`; tiles and pairs are as in the module's docstring.
    """
    launch_dependents(PDL)
    expert = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    at = tl.arange(0, CHUNK)
    wait_for_inputs(PDL)
    coming = tl.load(chosen + at, mask=at < P, other=-1)
    # Clamped, because the memory of trial steps is arbitrary (tandem/engine/cuda/compile_ahead.py).
    count_of = tl.load(counts + experts, mask=experts < E, other=0)
    count_of = tl.minimum(tl.maximum(count_of, 0), P)
    tiles_of = (count_of + TILE - 1) // TILE
    first = tl.sum(tl.where(experts < expert, tiles_of, 0), axis=0)
    count = tl.sum(tl.where(experts == expert, count_of, 0), axis=0)
    if expert == 0:
        tl.store(tiles + MAX_TILES, tl.sum(tiles_of, axis=0))
    for start in tl.range(0, (count + TILE - 1) // TILE, BLOCK_E):
        number = start + experts
        left = count - number * TILE
        inside = (left > 0) & (first + number < MAX_TILES)
        tl.store(tiles + first + number, expert * PAIRS_BASE + tl.minimum(left, TILE), mask=inside)
    # Pairs are read in the order of the tokens, a chunk at a time; a prefix sum over the chunk keeps that order.
    done = first * TILE
    end = MAX_TILES * TILE
    for start in tl.range(0, P, CHUNK):
        hits = (coming == expert).to(tl.int32)
        later = start + CHUNK + at
        coming = tl.load(chosen + later, mask=later < P, other=-1)
        place = done + tl.cumsum(hits, axis=0) - 1
        tl.store(pairs + place, start + at, mask=(hits > 0) & (place < end))
        done += tl.sum(hits, axis=0)
