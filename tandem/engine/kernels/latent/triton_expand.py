"""The kernels of expanded attention: keys and values of all heads from the paged latents, and the merge of results."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.config.attention import LatentShape
from tandem.engine.kernels.kv_cache import LatentCache, codes_of, has_codes
from tandem.engine.kernels.latent.triton_products import dot
from tandem.engine.kernels.triton_launch import INTERPRETED, launch_dependents, wait_for_inputs

_INNER = 64
"""Number of elements of the latent that a program multiplies at a time."""
_SUMS = 1 << 15
"""Number of sums (float32) of a program: 128 registers of each thread of eight warps."""
_MOST_TOKENS, _EXACT_TOKENS = 128, 32
"""Maximum number of tokens of a program in 16-bit types, and number of tokens in float32, without tensor cores."""
_MERGED_HEADS = 16
"""Number of heads whose results a program merges."""
TAIL = 128
"""Number of zeros after each row's keys and values, in tokens.

flash-attn-4 multiplies whole tiles, which have at most this number of keys, and gives keys after a row's end a weight
of zero. Without the zeros, the tile would contain keys and values of another row, and an infinite value or NaN among
them would make this row's result NaN.
"""


def expand(
    cache: LatentCache,
    layer: int,
    kv_up: Tensor,
    page_table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    first_positions: Tensor,
    longest: int,
    out: Tensor,
    shape: LatentShape,
    *,
    pdl: bool,
) -> None:
    """Compute the keys and values of a range of positions of each row.

    kv_up           [heads, nope + v_dim, latent]
    page_table      [R, W] int32
    starts, lengths [R] int32: the range of row r is out[starts[r] :][: lengths[r]], and `TAIL` zeros follow
    first_positions [R] int32: the first position of each row's range
    longest         an upper bound of the lengths
    out             [tokens, heads, nope + rope + v_dim]: each head's key, then its value
    """
    nope, values = (max(triton.next_power_of_2(dim), 16) for dim in (shape.nope, shape.v_dim))
    exact, codes = kv_up.dtype == torch.float32, codes_of(cache)
    tile = _EXACT_TOKENS if exact else min(_MOST_TOKENS, _SUMS // (nope + values))
    _expand[(triton.cdiv(longest + TAIL, tile), len(page_table), shape.heads)](
        codes,
        kv_up,
        page_table,
        starts,
        lengths,
        first_positions,
        out,
        codes.stride(0),
        codes.stride(1) * layer,
        page_table.stride(0),
        HEADS=shape.heads,
        LATENT=shape.latent,
        ROPE=shape.rope,
        ROPE_PADDED=triton.next_power_of_2(shape.rope),
        NOPE=shape.nope,
        NOPE_PADDED=nope,
        V_DIM=shape.v_dim,
        V_PADDED=values,
        PAGE_TOKENS=cache.shape[4],
        CODES=has_codes(cache),
        TOKENS=tile,
        INNER=min(_INNER, max(triton.next_power_of_2(shape.latent), 16)),
        TAIL=TAIL,
        PDL=pdl,
        WIDE_DOT=INTERPRETED,
        num_warps=8,
        num_stages=3,
        launch_pdl=pdl,
    )


def merge_block(mixed: Tensor, mixed_lse: Tensor, block: Tensor, block_lse: Tensor, seen: Tensor, *, pdl: bool) -> None:
    """Merge the attention results of a block of keys into `mixed` and `mixed_lse`, in place.

    mixed [T, heads, v_dim] is float32, block has the same shape in any dtype; mixed_lse and block_lse, the logarithms
    of the sums of weights, are [heads, T] float32. seen [T] int32: 0 = the token sees no key of the block, and the
    block's result for it is undefined.
    """
    tokens, heads, dims = mixed.shape
    _merge_block[(tokens, triton.cdiv(heads, _MERGED_HEADS))](
        mixed,
        mixed_lse,
        block,
        block_lse,
        seen,
        tokens,
        HEADS=heads,
        DIMS=dims,
        DIMS_PADDED=triton.next_power_of_2(dims),
        HEADS_TILE=_MERGED_HEADS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["page_table", "starts", "lengths", "first_positions"],
)
def _expand(
    cache,
    kv_up,
    page_table,
    starts,
    lengths,
    first_positions,
    out,
    page_stride,
    layer_offset,
    table_stride,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_PADDED: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    CODES: tl.constexpr,
    TOKENS: tl.constexpr,
    INNER: tl.constexpr,
    TAIL: tl.constexpr,
    PDL: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Program (tile of tokens, row, head) computes keys and values; those of the tail become zero."""
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(1)
    head = tl.program_id(2)
    begin = tl.load(starts + row)
    length = tl.load(lengths + row)
    number = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(0) * TOKENS < length + TAIL:
        real = number < length
        written = (number < length + TAIL)[:, None]
        position = tl.load(first_positions + row) + number
        page = tl.load(page_table + row * table_stride + position // PAGE_TOKENS, mask=real, other=0).to(tl.int64)
        pages = cache + layer_offset + (page * page_stride)[:, None]
        offset = (position % PAGE_TOKENS)[:, None]
        latents = pages + offset * (LATENT + ROPE)
        key_dim = tl.arange(0, NOPE_PADDED)[None, :]
        value_dim = tl.arange(0, V_PADDED)[None, :]
        matrix = kv_up + head * ((NOPE + V_DIM) * LATENT)
        keys = tl.zeros([TOKENS, NOPE_PADDED], tl.float32)
        values = tl.zeros([TOKENS, V_PADDED], tl.float32)
        for start in tl.range(0, LATENT, INNER):
            inner = start + tl.arange(0, INNER)
            latent = tl.load(latents + inner[None, :], mask=real[:, None] & (inner < LATENT)[None, :], other=0.0)
            weights = matrix + inner[:, None]
            present = (inner < LATENT)[:, None]
            latent = latent.to(kv_up.dtype.element_ty)
            key_weights = tl.load(weights + key_dim * LATENT, mask=present & (key_dim < NOPE), other=0.0)
            keys = dot(latent, key_weights, keys, WIDE_DOT)
            weights += NOPE * LATENT
            value_weights = tl.load(weights + value_dim * LATENT, mask=present & (value_dim < V_DIM), other=0.0)
            values = dot(latent, value_weights, values, WIDE_DOT)
        rotated = tl.arange(0, ROPE_PADDED)[None, :]
        key = tl.load(latents + LATENT + rotated, mask=real[:, None] & (rotated < ROPE), other=0.0)
        if CODES:
            scales = (pages + PAGE_TOKENS * (LATENT + ROPE)).to(tl.pointer_type(tl.float32), bitcast=True)
            scale = tl.load(scales + offset, mask=real[:, None], other=0.0)
            keys *= scale
            values *= scale
            key = key.to(tl.float32) * scale
        dtype: tl.constexpr = out.dtype.element_ty
        target = out + ((begin + number).to(tl.int64) * HEADS + head)[:, None] * (NOPE + ROPE + V_DIM)
        tl.store(target + key_dim, keys.to(dtype), mask=written & (key_dim < NOPE))
        tl.store(target + NOPE + ROPE + value_dim, values.to(dtype), mask=written & (value_dim < V_DIM))
        tl.store(target + NOPE + rotated, key.to(dtype), mask=written & (rotated < ROPE))


@triton.jit(do_not_specialize=["tokens"])
def _merge_block(
    mixed,
    mixed_lse,
    block,
    block_lse,
    seen,
    tokens,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    DIMS_PADDED: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, tile of heads) merges the results of one token, unless the token sees no key of the block."""
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    if tl.load(seen + token) > 0:
        head = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)
        dim = tl.arange(0, DIMS_PADDED)
        at = (token * HEADS + head)[:, None] * DIMS + dim[None, :]
        inside = (head < HEADS)[:, None] & (dim < DIMS)[None, :]
        lse = head * tokens + token
        before = tl.load(mixed_lse + lse, mask=head < HEADS, other=0.0)
        added = tl.load(block_lse + lse, mask=head < HEADS, other=0.0)
        highest = tl.maximum(before, added)
        kept, new = tl.exp(before - highest), tl.exp(added - highest)
        old_values = tl.load(mixed + at, mask=inside, other=0.0)
        new_values = tl.load(block + at, mask=inside, other=0.0).to(tl.float32)
        total = kept + new
        result = (old_values * kept[:, None] + new_values * new[:, None]) / total[:, None]
        tl.store(mixed + at, result, mask=inside)
        tl.store(mixed_lse + lse, highest + tl.log(total), mask=head < HEADS)
