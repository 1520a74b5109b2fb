"""Rotary embedding, norms of queries and keys, and the KV store of the CPU kernels, token by token."""

import struct

import numpy as np

from tandem.engine.kernels.cpu.pool import argument, inlined, real
from tandem.engine.kernels.cpu.products import F32, F32_BYTES, TOKENS_A_CHUNK, norm_factor
from tandem.engine.kernels.cpu.vector import item_bytes, load, load_int, scale_row, store

INT8, INT32, INT64 = np.int8(0), np.int32(0), np.int64(0)
"""Values whose types are the `tag` (see `ir.py`) of integer elements."""
LARGEST_CODE = 127
"""The largest code of int8 keys and values."""
(QKV, ANGLES, Q_NORM, K_NORM, WIDE_NORM, CACHE, PAGE_ITEMS, PART_ITEMS, HEAD_ITEMS, POSITIONS, SLOTS, TOKENS, HEADS,
 KV_HEADS, HEAD_DIM, VALUE_DIM, ROTATED, PAGE_TOKENS, QUANTIZED, EPS) = range(2, 22)  # fmt: skip
"""Indices of the arguments of a ROPE job.

`q_norm` and `k_norm` are the addresses of the norms' weights, 0 if there are no norms. The weights are float32 if
`wide_norm` is 1, else they have the model's dtype. `cache` is the layer's part of page 0; `page_items`, `part_items`
and `head_items` are the distances between pages, between keys and values, and between heads, in elements. Queries and
keys have `head_dim` dimensions, values `value_dim`. The leading `rotated` dimensions of a head are rotated. If
`quantized` is 1 the cache holds int8 codes, and the float32 scales follow the codes of a head's `page_tokens` tokens.
"""
ROPE = struct.Struct("=21qd")


@inlined
def rope_chunk(shared, chunk, scratch, tag):  # type: ignore[no-untyped-def]
    """Process the chunk's tokens: apply norm and rotary embedding to q in place and to k, and store k and v."""
    heads, kv_heads, head_dim = argument(shared, HEADS), argument(shared, KV_HEADS), argument(shared, HEAD_DIM)
    page_tokens, value_dim = argument(shared, PAGE_TOKENS), argument(shared, VALUE_DIM)
    rotated = argument(shared, ROTATED)
    half = rotated // 2
    part_items, head_items = argument(shared, PART_ITEMS), argument(shared, HEAD_ITEMS)
    qkv, q_norm, k_norm = argument(shared, QKV), argument(shared, Q_NORM), argument(shared, K_NORM)
    cache, size, rounded = argument(shared, CACHE), item_bytes(tag), scratch + head_dim * F32_BYTES
    quantized = argument(shared, QUANTIZED) != 0
    for token in range(chunk * TOKENS_A_CHUNK, min((chunk + 1) * TOKENS_A_CHUNK, argument(shared, TOKENS))):
        angles = argument(shared, ANGLES) + load_int(argument(shared, POSITIONS), token, INT32) * rotated * F32_BYTES
        slot = load_int(argument(shared, SLOTS), token, INT64)
        page = (slot // page_tokens) * argument(shared, PAGE_ITEMS)
        place = page + (slot % page_tokens) * head_dim
        head_row = qkv + token * ((heads + kv_heads) * head_dim + kv_heads * value_dim) * size
        for head in range(heads + kv_heads):
            source = head_row + head * head_dim * size
            is_key = head >= heads
            _norm_head(shared, source, k_norm if is_key else q_norm, scratch, tag)
            target = source
            if is_key:
                target = rounded if quantized else cache + (place + (head - heads) * head_items) * size
            for i in range(half):
                first, second = load(scratch, i, F32), load(scratch, half + i, F32)
                cos, sin = load(angles, i, F32), load(angles, half + i, F32)
                store(target, i, first * cos - second * sin, tag)
                store(target, half + i, second * cos + first * sin, tag)
            for i in range(rotated, head_dim):
                store(target, i, load(scratch, i, F32), tag)
            if is_key and quantized:
                plane = cache + page + (head - heads) * head_items
                _store_codes(shared, rounded, plane, slot % page_tokens, head_dim, scratch, tag)
        for head in range(kv_heads):
            source = head_row + ((heads + kv_heads) * head_dim + head * value_dim) * size
            plane = page + part_items + head * head_items
            if quantized:
                _store_codes(shared, source, cache + plane, slot % page_tokens, value_dim, scratch, tag)
            else:
                target = cache + (plane + (slot % page_tokens) * value_dim) * size
                for i in range(value_dim):
                    store(target, i, load(source, i, tag), tag)


@inlined
def _norm_head(shared, source, norm, scratch, tag):  # type: ignore[no-untyped-def]
    """Write head_dim elements to `scratch` as float32, with the norm applied if there is one."""
    head_dim = argument(shared, HEAD_DIM)
    factor = np.float32(1.0)
    if norm != 0:
        factor = norm_factor(source, real(shared, EPS), head_dim, tag)
    for i in range(head_dim):
        value = load(source, i, tag) * factor
        if norm != 0:
            value *= load(norm, i, F32) if argument(shared, WIDE_NORM) != 0 else load(norm, i, tag)
        store(scratch, i, value, F32)


@inlined
def _store_codes(shared, source, plane, token, dims, scratch, tag):  # type: ignore[no-untyped-def]
    """Store `dims` elements of type `tag` as codes and a scale, for token `token` of the page and head at `plane`.

    The scale is NaN if an element is infinite or NaN.
    """
    page_tokens = argument(shared, PAGE_TOKENS)
    most, poison = np.float32(0), np.float32(0)
    for i in range(dims):
        value = load(source, i, tag)
        store(scratch, i, value, F32)
        most = max(most, abs(value))
        poison += value - value  # 0, or NaN if the element is not finite
    factor = np.float32(LARGEST_CODE) / most if most > 0 else np.float32(0)
    scale_row(scratch, factor, plane + token * dims, dims, INT8)
    store(plane + page_tokens * dims, token, most / np.float32(LARGEST_CODE) + poison, F32)
