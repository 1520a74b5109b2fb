"""Paged attention of the CPU kernels.

Attention is divided into items. An item computes up to 16 queries of one row that share a key head, against the row's
keys in blocks of 256 (FlashAttention's running softmax over the blocks, arXiv:2205.14135). A row of one token has an
item for each block, so that a long context is spread over the cores (Flash-Decoding); the partial results are merged in
the order of the blocks. Blocks are counted from position 0, so the result of a row depends only on its own context.
"""

import struct

import numpy as np

from tandem.engine.kernels.cpu.ir import LANES
from tandem.engine.kernels.cpu.pool import CHUNKS, argument, atomic_store, inlined, real
from tandem.engine.kernels.cpu.products import F32, F32_BYTES
from tandem.engine.kernels.cpu.rope import INT32, INT64
from tandem.engine.kernels.cpu.tiles import dot_rows, mix_rows
from tandem.engine.kernels.cpu.vector import (
    add_row,
    cap_row,
    combine_row,
    exp,
    item_bytes,
    load,
    load_int,
    max_of,
    multiply_row,
    scale_row,
    soften_row,
    store,
    sum_of,
    widen_row,
)

QUERIES = 16
"""Maximum number of queries in an item."""
KEYS = 256
"""Number of keys in a block."""
WIDENED_KEYS = 32
"""Maximum number of int8 keys or values that are converted at a time: with head dim 256 they still fit into L1."""
ITEM_FIELDS = 5
"""Number of int64 fields of an item: row, key head, first query, block (-1 = all), partial result slot (-1 = none)."""
LOWEST = np.float32(-1e30)
"""A finite number below every score, so that a block without a visible key adds exactly nothing."""

(Q, Q_ITEMS, OUT, CACHE, PAGE_ITEMS, PART_ITEMS, HEAD_ITEMS, PAGE_TOKENS, POSITIONS, ROW_STARTS, CONTEXT_LENS,
 PAGE_TABLE, COLUMNS, TABLE_ROWS, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, WINDOW, CHUNK, SINKS, ITEMS, PARTIALS,
 QUANTIZED, SCALE, SOFTCAP) = range(2, 28)  # fmt: skip
"""Indices of the arguments of an ATTENTION job.

`q_items` is the distance between the tokens of q, in elements. `cache` is the layer's part of page 0; `page_items`,
`part_items` and `head_items` are the distances between pages, between keys and values, and between heads. `page_table`
has `table_rows` rows of `columns` entries. Queries and keys have `head_dim` dimensions, values `value_dim`. A token
sees those of its `window` latest positions that are in the same chunk of `chunk` positions. `sinks` (float32) and
`softcap` are 0 where there are none. `items` and `partials` are memory for the list of items and for partial results
(each value_dim sums, the largest score and the total weight, in float32). If `quantized` is 1 the cache holds codes and
scales, laid out as the arguments of `rope.ROPE` say.
"""
ATTENTION = struct.Struct("=26q2d")


@inlined
def _first_seen(shared, position):  # type: ignore[no-untyped-def]
    """Return the first position that a token at `position` sees."""
    chunk = argument(shared, CHUNK)
    return max(position - argument(shared, WINDOW) + 1, position // chunk * chunk, 0)


@inlined
def list_items(shared):  # type: ignore[no-untyped-def]
    """Write the items of the step to the `items` argument, and return their number."""
    items, kv_heads = argument(shared, ITEMS), argument(shared, KV_HEADS)
    row_starts, context_lens = argument(shared, ROW_STARTS), argument(shared, CONTEXT_LENS)
    count, slots, group = 0, 0, argument(shared, HEADS) // kv_heads
    for row in range(argument(shared, TABLE_ROWS)):
        tokens = load_int(row_starts, row + 1, INT32) - load_int(row_starts, row, INT32)
        context = load_int(context_lens, row, INT32)
        first_block = _first_seen(shared, context - 1) // KEYS
        last_block = (context - 1) // KEYS
        # Only rows of one token are split into blocks: longer rows have an item for each 16 queries.
        split = tokens == 1 and first_block != last_block
        for head in range(kv_heads):
            for query in range(0, tokens * group, QUERIES):
                for block in range(first_block, (last_block if split else first_block) + 1):
                    item = items + 8 * ITEM_FIELDS * count
                    atomic_store(item, row)
                    atomic_store(item + 8, head)
                    atomic_store(item + 16, query)
                    atomic_store(item + 24, block if split else -1)
                    atomic_store(item + 32, slots if split else -1)
                    slots += min(QUERIES, group) if split else 0
                    count += 1
    return count


@inlined
def attention_chunk(shared, chunk, scratch, tag):  # type: ignore[no-untyped-def]
    """Compute the item whose number in the list is `chunk`."""
    heads, kv_heads, head_dim = argument(shared, HEADS), argument(shared, KV_HEADS), argument(shared, HEAD_DIM)
    positions, size = argument(shared, POSITIONS), item_bytes(tag)
    group = heads // kv_heads
    item = argument(shared, ITEMS) + 8 * ITEM_FIELDS * chunk
    row, head, first_query = load_int(item, 0, INT64), load_int(item, 1, INT64), load_int(item, 2, INT64)
    block, slot = load_int(item, 3, INT64), load_int(item, 4, INT64)
    row_start = load_int(argument(shared, ROW_STARTS), row, INT32)
    row_tokens = load_int(argument(shared, ROW_STARTS), row + 1, INT32) - row_start
    queries, value_dim = min(QUERIES, row_tokens * group - first_query), argument(shared, VALUE_DIM)
    stride = value_dim * F32_BYTES
    scores = scratch
    qs, sums = scores + QUERIES * KEYS * F32_BYTES, scores + QUERIES * (KEYS + head_dim) * F32_BYTES
    fresh = sums + QUERIES * stride
    largest, weights = fresh + QUERIES * stride, fresh + QUERIES * (stride + F32_BYTES)
    wide = weights + QUERIES * F32_BYTES

    # A sink counts once, in the first block of a row that is split.
    first_block = _first_seen(shared, load_int(argument(shared, CONTEXT_LENS), row, INT32) - 1) // KEYS
    has_sink = argument(shared, SINKS) != 0 and (block < 0 or block == first_block)
    for i in range(queries):
        token, member = row_start + (first_query + i) // group, (first_query + i) % group
        source = argument(shared, Q) + (token * argument(shared, Q_ITEMS) + (head * group + member) * head_dim) * size
        for d in range(head_dim):
            store(qs + i * head_dim * size, d, load(source, d, tag), tag)
        for d in range(value_dim):
            store(sums + i * stride, d, np.float32(0), F32)
        store(largest, i, load(argument(shared, SINKS), head * group + member, F32) if has_sink else LOWEST, F32)
        store(weights, i, np.float32(1 if has_sink else 0), F32)

    # Only keys that some query of the item sees are read: from the first query's window up to the last query's
    # position.
    first_read = _first_seen(shared, load_int(positions, row_start + first_query // group, INT32))
    end = load_int(positions, row_start + (first_query + queries - 1) // group, INT32) + 1
    start = first_read // KEYS * KEYS
    if block >= 0:
        start, end = block * KEYS, min(end, (block + 1) * KEYS)
    for begin in range(start, end, KEYS):
        stop = min(begin + KEYS, end)
        # No query sees keys before the first query's window, and other requests may own the pages there by now.
        begin = max(begin, first_read)  # noqa: PLW2901
        _score(shared, row, head, begin, stop, qs, queries, scores, wide, tag)
        for i in range(queries):
            position = load_int(positions, row_start + (first_query + i) // group, INT32)
            target, scale, softcap = scores + i * KEYS * F32_BYTES, real(shared, SCALE), real(shared, SOFTCAP)
            first_seen = _first_seen(shared, position)
            factor = _soften(target, begin, stop, first_seen, position, scale, softcap, largest, weights, i)
            scale_row(sums + i * stride, factor, sums + i * stride, value_dim, F32)
            for d in range(value_dim):
                store(fresh + i * stride, d, np.float32(0), F32)
        # A block is summed by itself first: long contexts would round away what each key adds.
        _mix(shared, row, head, begin, stop, scores, queries, fresh, stride, wide, tag)
        add_row(sums, fresh, queries * value_dim, F32)

    for i in range(queries):
        if slot >= 0:
            partial = argument(shared, PARTIALS) + (slot + i) * (value_dim + 2) * F32_BYTES
            scale_row(sums + i * stride, np.float32(1.0), partial, value_dim, F32)
            store(partial, value_dim, load(largest, i, F32), F32)
            store(partial, value_dim + 1, load(weights, i, F32), F32)
        else:
            token, member = row_start + (first_query + i) // group, (first_query + i) % group
            target = argument(shared, OUT) + (token * heads + head * group + member) * value_dim * size
            factor = np.float32(1.0) / load(weights, i, F32)
            scale_row(sums + i * stride, factor, target, value_dim, tag)


@inlined
def _plane(shared, row, head, key, values):  # type: ignore[no-untyped-def]
    """Return the index in the layer's cache of the head's first key (or value) in the page of position `key`."""
    page_tokens = argument(shared, PAGE_TOKENS)
    page = load_int(argument(shared, PAGE_TABLE), row * argument(shared, COLUMNS) + key // page_tokens, INT32)
    plane = head * argument(shared, HEAD_ITEMS) + (argument(shared, PART_ITEMS) if values else 0)
    return page * argument(shared, PAGE_ITEMS) + plane


@inlined
def _keys_at_once(shared, key, stop):  # type: ignore[no-untyped-def]
    """Return the number of keys to process at once from `key` on: the rest of the page, or fewer if quantized."""
    page_tokens = argument(shared, PAGE_TOKENS)
    n = min(page_tokens - key % page_tokens, stop - key)
    return min(n, WIDENED_KEYS) if argument(shared, QUANTIZED) != 0 else n


@inlined
def _rows(shared, plane, token, n, dims, wide, tag):  # type: ignore[no-untyped-def]
    """Return the address of n keys or values of type `tag`: in the cache, or in `wide` if converted from codes.

    They have `dims` elements each, and are those of the page's tokens from `token` on; `plane` is the result of
    `_plane`.
    """
    if argument(shared, QUANTIZED) == 0:
        return argument(shared, CACHE) + (plane + token * dims) * item_bytes(tag)
    widen_row(argument(shared, CACHE) + plane + token * dims, wide, n * dims, tag)
    return wide


@inlined
def _apply_scales(shared, plane, token, n, dims, numbers, queries):  # type: ignore[no-untyped-def]
    """Multiply n numbers of each query by the scales of n keys or values from `token` on, if the cache is quantized."""
    if argument(shared, QUANTIZED) != 0:
        scales = argument(shared, CACHE) + plane + argument(shared, PAGE_TOKENS) * dims
        for i in range(queries):
            multiply_row(numbers + i * KEYS * F32_BYTES, scales + token * F32_BYTES, n, F32)


@inlined
def _score(shared, row, head, begin, stop, qs, queries, scores, wide, tag):  # type: ignore[no-untyped-def]
    """Compute scores[q][key - begin] = q · key for the keys begin .. stop, page by page."""
    page_tokens, head_dim, size = argument(shared, PAGE_TOKENS), argument(shared, HEAD_DIM), item_bytes(tag)
    key = begin
    while key < stop:
        n = _keys_at_once(shared, key, stop)
        plane, token = _plane(shared, row, head, key, False), key % page_tokens
        keys, target = _rows(shared, plane, token, n, head_dim, wide, tag), scores + (key - begin) * F32_BYTES
        dot_rows(keys, head_dim * size, n, qs, head_dim * size, queries, head_dim, target, KEYS * F32_BYTES, tag)
        _apply_scales(shared, plane, token, n, head_dim, target, queries)
        key += n


@inlined
def _soften(scores, begin, stop, first_seen, position, scale, softcap, largest, weights, i):  # type: ignore[no-untyped-def]
    """Turn a block's scores into softmax weights relative to the largest score so far.

    Positions before `first_seen` and after `position` are masked. Updates the running largest score and total weight of
    query `i`, and returns the factor by which its sums of earlier blocks must be multiplied.
    """
    n = (stop - begin + LANES - 1) // LANES * LANES
    if softcap != 0:
        cap_row(scores, scale / softcap, softcap, n, F32)
        scale = np.float32(1.0)
    for j in range(min(max(first_seen - begin, 0), n)):
        store(scores, j, np.float32(-np.inf), F32)
    for j in range(max(min(position + 1, stop) - begin, 0), n):
        store(scores, j, np.float32(-np.inf), F32)
    before = load(largest, i, F32)
    now = max(before, max_of(scores, n) * scale)
    soften_row(scores, scale, now, n, F32)
    factor = exp(before - now)
    store(largest, i, now, F32)
    store(weights, i, load(weights, i, F32) * factor + sum_of(scores, n), F32)
    return factor


@inlined
def _mix(shared, row, head, begin, stop, scores, queries, sums, stride, wide, tag):  # type: ignore[no-untyped-def]
    """Add Σ weight · value to sums[q] for each query, page by page; weights are multiplied by value scales first."""
    page_tokens, dims, size = argument(shared, PAGE_TOKENS), argument(shared, VALUE_DIM), item_bytes(tag)
    key = begin
    while key < stop:
        n = _keys_at_once(shared, key, stop)
        plane, token = _plane(shared, row, head, key, True), key % page_tokens
        values, weights = _rows(shared, plane, token, n, dims, wide, tag), scores + (key - begin) * F32_BYTES
        _apply_scales(shared, plane, token, n, dims, weights, queries)
        mix_rows(values, dims * size, n, weights, KEYS * F32_BYTES, queries, sums, stride, dims, tag)
        key += n


@inlined
def merge_partials(shared, tag):  # type: ignore[no-untyped-def]
    """Merge the partial results of rows that were split into blocks, in the order of the blocks, into the output."""
    heads, kv_heads, dims = argument(shared, HEADS), argument(shared, KV_HEADS), argument(shared, VALUE_DIM)
    group, stride = heads // kv_heads, (dims + 2) * F32_BYTES
    items, count, first = argument(shared, ITEMS), argument(shared, CHUNKS), 0
    while first < count:
        item = items + 8 * ITEM_FIELDS * first
        row, head, query = load_int(item, 0, INT64), load_int(item, 1, INT64), load_int(item, 2, INT64)
        slot, last = load_int(item, 4, INT64), first
        while last + 1 < count and _continues(items, last):
            last += 1
        if slot >= 0:
            token = load_int(argument(shared, ROW_STARTS), row, INT32)
            for i in range(min(QUERIES, group - query)):
                partial = argument(shared, PARTIALS) + (slot + i) * stride
                target = (token * heads + head * group + query + i) * dims * item_bytes(tag)
                _merge(
                    partial,
                    last - first + 1,
                    min(QUERIES, group) * stride,
                    argument(shared, OUT) + target,
                    dims,
                    tag,
                )
        first = last + 1


@inlined
def _continues(items, index):  # type: ignore[no-untyped-def]
    """Return True if the item after item `index` computes the next block of the same row."""
    item = items + 8 * ITEM_FIELDS * index
    block, following = load_int(item, 3, INT64), load_int(item, ITEM_FIELDS + 3, INT64)
    return block >= 0 and following == block + 1 and load_int(item, ITEM_FIELDS, INT64) == load_int(item, 0, INT64)


@inlined
def _merge(partial, blocks, stride, out, dims, tag):  # type: ignore[no-untyped-def]
    """Merge the partial results of one query into the first one, and round the result to `out`.

    The partial results are `stride` bytes apart.
    """
    for block in range(1, blocks):
        next_partial = partial + block * stride
        before, after = load(partial, dims, F32), load(next_partial, dims, F32)
        now = max(before, after)
        kept, added = exp(before - now), exp(after - now)
        combine_row(partial, kept, next_partial, added, dims, F32)
        total = load(partial, dims + 1, F32) * kept + load(next_partial, dims + 1, F32) * added
        store(partial, dims, now, F32)
        store(partial, dims + 1, total, F32)
    factor = np.float32(1.0) / load(partial, dims + 1, F32)
    scale_row(partial, factor, out, dims, tag)
