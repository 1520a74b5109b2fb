"""The kernels of `absorbed.AbsorbedAttention`.

The tokens of a step are divided into groups: up to `AbsorbedAttention(tokens=...)` consecutive tokens of one row. A
program handles up to ROWS (token, head) pairs of one group at a time, and loads each tile of latents once for all of
them. A group's context ends with its last token. A tile is BLOCK_TOKENS positions of the cache, counted from position 0
of the row. Scores and log-sum-exps are base-2 logarithms (for `exp2`).
"""

import triton
import triton.language as tl

from tandem.engine.kernels import kv_cache
from tandem.engine.kernels.latent.triton_products import dot
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs

RANGE_FIELDS = tl.constexpr(4)
"""Number of fields of a program's range: first group, last group + 1, first tile of the first group, tile count."""
PART_FIELDS = tl.constexpr(2)
"""Number of fields of a group's entry in `parts`: slot of the first partial result, number of partial results."""
SCALE_BYTES = tl.constexpr(kv_cache.SCALE_BYTES)
"""Size of a scale in bytes."""
GROUP_FIELDS = tl.constexpr(3)
"""Number of fields of a group of several tokens: its row, its first token, its number of tokens."""


@triton.jit(do_not_specialize=["groups", "units"], do_not_specialize_on_alignment=["contexts", "parts"])
def plan_ranges_kernel(
    contexts,
    ranges,
    parts,
    groups,
    units,
    SPLITS: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    GROUPS_TILE: tl.constexpr,
):
    """Program n computes the range of attention program (unit) n, and the slots of group n's partial results.

    With SPLITS each group is cut into that many ranges, which depend only on its own context. Without SPLITS, the tiles
    of all groups are concatenated and cut into ranges of equal length, so that no program waits for a long group. The
    partial result that a unit computes for a group is stored in slot group + unit.
    """
    number = tl.program_id(0)
    if SPLITS > 0:
        group = number // SPLITS
        tiles = tl.cdiv(tl.load(contexts + group), BLOCK_TOKENS)
        length = tl.maximum(tl.cdiv(tiles, SPLITS), LEAST_TILES)
        start = number % SPLITS * length
        taken = tl.maximum(tl.minimum(length, tiles - start), 0)
        _store_range(ranges, number, group, tl.where(taken > 0, group + 1, group), start, taken)
        if start == 0:
            tl.store(parts + group * PART_FIELDS, number + group)
            tl.store(parts + group * PART_FIELDS + 1, tl.cdiv(tiles, length))
    else:
        total = 0
        for first in tl.range(0, groups, GROUPS_TILE):
            total += tl.sum(_tiles_at(contexts, first, groups, BLOCK_TOKENS, GROUPS_TILE), axis=0)
        length = tl.maximum(tl.cdiv(total, units), 1)
        start = number * length
        end = tl.minimum(start + length, total)
        first_group = 0
        last_group = 0
        before = 0
        own_before = 0
        own_tiles = 0
        passed = 0
        for first in tl.range(0, groups, GROUPS_TILE):
            tiles = _tiles_at(contexts, first, groups, BLOCK_TOKENS, GROUPS_TILE)
            group = first + tl.arange(0, GROUPS_TILE)
            ends = passed + tl.cumsum(tiles, 0)
            ended = (group < groups) & (ends <= start)
            first_group += tl.sum(ended.to(tl.int32), axis=0)
            before += tl.sum(tl.where(ended, tiles, 0), axis=0)
            last_group += tl.sum(((group < groups) & (ends - tiles < end)).to(tl.int32), axis=0)
            own_before += tl.sum(tl.where(group == number, ends - tiles, 0), axis=0)
            own_tiles += tl.sum(tl.where(group == number, tiles, 0), axis=0)
            passed += tl.sum(tiles, axis=0)
        if number < units:
            _store_range(ranges, number, first_group, last_group, start - before, tl.maximum(end - start, 0))
        if number < groups:
            first_unit = own_before // length
            last_unit = (own_before + own_tiles - 1) // length
            tl.store(parts + number * PART_FIELDS, number + first_unit)
            tl.store(parts + number * PART_FIELDS + 1, tl.where(own_tiles > 0, last_unit - first_unit + 1, 0))


@triton.jit
def _tiles_at(contexts, first, groups, BLOCK_TOKENS: tl.constexpr, GROUPS_TILE: tl.constexpr):
    """Return the number of tiles [GROUPS_TILE] of each of the groups from `first` on."""
    group = first + tl.arange(0, GROUPS_TILE)
    return tl.cdiv(tl.load(contexts + group, mask=group < groups, other=0), BLOCK_TOKENS)


@triton.jit
def _store_range(ranges, unit, first_group, last_group, start, tiles):
    tl.store(ranges + unit * RANGE_FIELDS, first_group)
    tl.store(ranges + unit * RANGE_FIELDS + 1, last_group)
    tl.store(ranges + unit * RANGE_FIELDS + 2, start)
    tl.store(ranges + unit * RANGE_FIELDS + 3, tiles)


@triton.jit
def _page_of(table, tile, context, PAGE_TOKENS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Return the page id of a tile, or the page ids [BLOCK_TOKENS] of its tokens if a page does not hold whole tiles.

    The id is 0 where no position is seen.
    """
    start = tile * BLOCK_TOKENS
    if PAGE_TOKENS % BLOCK_TOKENS == 0:
        page = tl.load(table + start // PAGE_TOKENS, mask=start < context, other=0)
    else:
        position = start + tl.arange(0, BLOCK_TOKENS)
        page = tl.load(table + position // PAGE_TOKENS, mask=position < context, other=0)
    return page


@triton.jit
def _offsets_of(page, tile, page_stride, WIDTH: tl.constexpr, PAGE_TOKENS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Return the offsets [BLOCK_TOKENS, 1] of a tile's tokens in the cache, in elements."""
    token = tl.arange(0, BLOCK_TOKENS)
    if PAGE_TOKENS % BLOCK_TOKENS == 0:
        offset = page.to(tl.int64) * page_stride + (tile * BLOCK_TOKENS % PAGE_TOKENS) * WIDTH
        offsets = offset + (token * WIDTH)[:, None]
    else:
        within = (tile * BLOCK_TOKENS + token) % PAGE_TOKENS
        offsets = (page.to(tl.int64) * page_stride + within * WIDTH)[:, None]
    return offsets


@triton.jit
def _attend(
    query,
    turned_query,
    latents,
    table,
    start,
    end,
    context,
    visible,
    page_stride,
    log2_scale,
    GROUPED: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Compute attention of absorbed queries [ROWS, LATENT_PADDED], with their rotated parts, to the tiles start .. end.

    Row i sees positions below visible[i], which is at most `context`. Returns the running maximum and sum [ROWS] of the
    scores, and the weighted latents [ROWS, LATENT_PADDED].

    With LARGEST, the largest code, latents are 8-bit codes. A token's scale multiplies its scores. Its scale · LARGEST,
    which is the largest number of the token, multiplies its weight, because weight · scale may underflow in float16.
    """
    dim = tl.arange(0, LATENT_PADDED)[None, :]
    rotated = tl.arange(0, ROPE_PADDED)[None, :]
    token = tl.arange(0, BLOCK_TOKENS)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, LATENT_PADDED], tl.float32)
    page = _page_of(table, start, context, PAGE_TOKENS, BLOCK_TOKENS)
    for tile in tl.range(start, end):
        offsets = _offsets_of(page, tile, page_stride, LATENT + ROPE, PAGE_TOKENS, BLOCK_TOKENS)
        position = tile * BLOCK_TOKENS + token
        seen = (position < context)[:, None]
        scale = 1.0
        if LARGEST > 0:
            scales = latents + PAGE_TOKENS * (LATENT + ROPE)
            scales += _offsets_of(page, tile, page_stride, SCALE_BYTES, PAGE_TOKENS, BLOCK_TOKENS)
            scale = tl.trans(tl.load(scales.to(tl.pointer_type(tl.float32), bitcast=True), mask=seen, other=0.0))
        # The next tile's page id is loaded while this tile is computed.
        page = _page_of(table, tile + 1, context, PAGE_TOKENS, BLOCK_TOKENS)
        latent = tl.load(latents + offsets + dim, mask=seen & (dim < LATENT), other=0.0).to(query.dtype)
        key = tl.load(latents + offsets + LATENT + rotated, mask=seen & (rotated < ROPE), other=0.0).to(query.dtype)
        scores = dot(turned_query, tl.trans(key), tl.zeros([ROWS, BLOCK_TOKENS], tl.float32), WIDE_DOT)
        scores = dot(query, tl.trans(latent), scores, WIDE_DOT) * (scale * log2_scale)
        scores = tl.where(position[None, :] < visible[:, None], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        base = higher
        if GROUPED:  # the first tokens of a group may see nothing of the last tile
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(scores - base[:, None])
        fade = tl.exp2(highest - base)
        total = total * fade + tl.sum(weight, axis=1)
        if LARGEST > 0:
            weight *= scale * LARGEST
        mixed = dot(weight.to(latent.dtype), latent, mixed * fade[:, None], WIDE_DOT)
        highest = higher
    if LARGEST > 0:
        mixed /= LARGEST
    return highest, total, mixed


@triton.jit(
    do_not_specialize=["table_stride", "slots"],
    do_not_specialize_on_alignment=["page_table", "contexts"],
)
def absorbed_attention_kernel(
    q,
    cache,
    page_table,
    contexts,
    group_table,
    ranges,
    partials,
    partial_lse,
    page_stride,
    layer_offset,
    table_stride,
    slots,
    log2_scale,
    GROUPED: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Program (tile of heads, unit) computes the groups of its range one after another.

    partials [tiles of heads, slots, ROWS, LATENT] and partial_lse [tiles of heads, slots, ROWS], both float32, are the
    normalised partial results and the binary logarithms of the sums of their weights.
    """
    launch_dependents(PDL)
    heads_tile = tl.program_id(0)
    unit = tl.program_id(1)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, LATENT_PADDED)[None, :]
    rotated = tl.arange(0, ROPE_PADDED)[None, :]
    wait_for_inputs(PDL)

    first_group = tl.load(ranges + unit * RANGE_FIELDS)
    last_group = tl.load(ranges + unit * RANGE_FIELDS + 1)
    start = tl.load(ranges + unit * RANGE_FIELDS + 2)
    left = tl.load(ranges + unit * RANGE_FIELDS + 3)
    for group in tl.range(first_group, last_group):
        context = tl.load(contexts + group)
        end = tl.minimum(start + left, tl.cdiv(context, BLOCK_TOKENS))
        table_row = group
        first_token = group
        tokens = 1
        if GROUPED:
            table_row = tl.load(group_table + group * GROUP_FIELDS)
            first_token = tl.load(group_table + group * GROUP_FIELDS + 1)
            tokens = tl.load(group_table + group * GROUP_FIELDS + 2)
        place = heads_tile * ROWS + row
        held = place < tokens * HEADS
        cells = q + (first_token.to(tl.int64) * HEADS + place)[:, None] * (LATENT + ROPE)
        query = tl.load(cells + dim, mask=held[:, None] & (dim < LATENT), other=0.0)
        turned_query = tl.load(cells + LATENT + rotated, mask=held[:, None] & (rotated < ROPE), other=0.0)
        visible = context - tokens + 1 + place // HEADS if GROUPED else context + place * 0
        highest, total, mixed = _attend(
            query, turned_query, cache + layer_offset, page_table + table_row * table_stride, start, end, context,
            visible, page_stride, log2_scale,
            GROUPED, LATENT, LATENT_PADDED, ROPE, ROPE_PADDED, PAGE_TOKENS, LARGEST, BLOCK_TOKENS, ROWS, WIDE_DOT,
        )  # fmt: skip
        if end > start:
            slot = heads_tile * slots + unit + group
            divisor = tl.where(total > 0.0, total, 1.0)
            target = partials + (slot.to(tl.int64) * ROWS + row)[:, None] * LATENT + dim
            tl.store(target, mixed / divisor[:, None], mask=held[:, None] & (dim < LATENT))
            tl.store(partial_lse + slot * ROWS + row, highest + tl.log2(divisor), mask=held)
        left -= tl.maximum(end - start, 0)
        start = 0


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["parts"])
def merge_kernel(
    partials,
    partial_lse,
    parts,
    group_table,
    token_groups,
    out,
    slots,
    GROUPED: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS_TILE: tl.constexpr,
    DIMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, head, dimensions) merges the partial results in the order of the units, or stores zeros.

    out [T, HEADS, LATENT], in the model's dtype.
    """
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    group = token
    place = head
    count = 0
    if GROUPED:
        group = tl.load(token_groups + token)
        if group >= 0:
            place += (token - tl.load(group_table + group * GROUP_FIELDS + 1)) * HEADS
            count = tl.load(parts + group * PART_FIELDS + 1)
    else:
        count = tl.load(parts + group * PART_FIELDS + 1)
    first = tl.load(parts + tl.maximum(group, 0) * PART_FIELDS)
    base = place // ROWS * slots + first
    row = place % ROWS
    highest = float("-inf")
    total = 0.0
    mixed = tl.zeros([DIMS], tl.float32)
    for start in tl.range(0, count, SPLITS_TILE):
        split = start + tl.arange(0, SPLITS_TILE)
        slot = ((base + split) * ROWS + row).to(tl.int64)
        lse = tl.load(partial_lse + slot, mask=split < count, other=float("-inf"))
        inside = (split < count)[:, None] & (dim < LATENT)[None, :]
        values = tl.load(partials + slot[:, None] * LATENT + dim[None, :], mask=inside, other=0.0)
        higher = tl.maximum(highest, tl.max(lse, axis=0))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(lse - anchor)
        fade = tl.exp2(highest - anchor)
        total = total * fade + tl.sum(weight, axis=0)
        mixed = mixed * fade + tl.sum(values * weight[:, None], axis=0)
        highest = higher
    result = mixed / tl.where(total > 0.0, total, 1.0)
    target = out + (token.to(tl.int64) * HEADS + head) * LATENT + dim
    tl.store(target, result.to(out.dtype.element_ty), mask=dim < LATENT)
