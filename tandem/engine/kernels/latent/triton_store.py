"""The store of latents: RMSNorm of the latent and rotary embedding of the queries and the shared key, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import LatentCache, codes_of, largest_code
from tandem.engine.kernels.layers import LatentLayer
from tandem.engine.kernels.rowwise.triton_codes import store_scale
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs
from tandem.engine.kernels.triton_math import as_codes

HEADS_TILE = 16
"""Number of heads whose queries a program rotates."""
WARPS = 4


def latent_store(
    q: Tensor, latents: Tensor, layer: LatentLayer, cache: LatentCache, layout: StepLayout, *, pdl: bool
) -> Tensor:
    """Compute `Kernels.latent_store` in one launch; the queries are rotated in place.

    q         [T, heads·(nope + rope)] and latents [T, latent + rope]: rows may be strided
    layout    a token with slot -1 is not stored, and its query is undefined
    → a view of q [T, heads, nope + rope]. Arithmetic is float32, rounded once; codes are those that `quantize_kv` gives
    for the rounded numbers.
    """
    shape, codes = layer.shape, codes_of(cache)
    _latent_store[(len(q), 1 + triton.cdiv(shape.heads, HEADS_TILE))](
        q,
        latents,
        layer.rope,
        layer.norm.weight,
        codes,
        layout.positions,
        layout.slots,
        q.stride(0),
        latents.stride(0),
        codes.stride(0),
        codes.stride(1) * layer.index,
        layer.norm.eps,
        HEADS=shape.heads,
        LATENT=shape.latent,
        LATENT_PADDED=triton.next_power_of_2(shape.latent),
        NOPE=shape.nope,
        ROPE=shape.rope,
        HALF_PADDED=triton.next_power_of_2(shape.rope // 2),
        PAGE_TOKENS=cache.shape[4],
        WIDTH=shape.cached,
        LARGEST=largest_code(cache),
        HEADS_TILE=HEADS_TILE,
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
    )
    rotated: Tensor = q.unflatten(1, (shape.heads, shape.query))
    return rotated


@triton.jit
def _latent_store(
    q_ptr,
    latents_ptr,
    rope_ptr,
    norm_ptr,
    cache_ptr,
    positions_ptr,
    slots_ptr,
    q_stride,
    latents_stride,
    page_stride,
    layer_offset,
    eps,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, part): part 0 stores the latent and the key, part 1 + i rotates the i-th tile of heads."""
    HALF: tl.constexpr = ROPE // 2
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        half = tl.arange(0, HALF_PADDED)
        inside = half < HALF
        cos, sin = angles_at(rope_ptr, tl.load(positions_ptr + token), half, inside, HALF)
        if part == 0:
            dim = tl.arange(0, LATENT_PADDED)
            source = latents_ptr + token * latents_stride
            page = cache_ptr + slot // PAGE_TOKENS * page_stride + layer_offset
            target = page + slot % PAGE_TOKENS * WIDTH
            kind: tl.constexpr = cache_ptr.dtype.element_ty
            x = tl.load(source + dim, mask=dim < LATENT, other=0.0).to(tl.float32)
            weight = tl.load(norm_ptr + dim, mask=dim < LATENT, other=0.0).to(tl.float32)
            normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / LATENT + eps) * weight
            first, second = rotated_pairs(source + LATENT + half, cos, sin, inside, HALF)
            if LARGEST > 0:
                rounded: tl.constexpr = latents_ptr.dtype.element_ty
                normed = normed.to(rounded).to(tl.float32)
                first, second = first.to(rounded).to(tl.float32), second.to(rounded).to(tl.float32)
                most = tl.maximum(_bits(normed), tl.maximum(_bits(first), _bits(second)))
                scale_at = (page + PAGE_TOKENS * WIDTH).to(tl.pointer_type(tl.float32), bitcast=True)
                factor = store_scale(most.to(tl.float32, bitcast=True), scale_at + slot % PAGE_TOKENS, True, LARGEST)
                tl.store(target + dim, as_codes(normed * factor, LARGEST, kind), mask=dim < LATENT)
                tl.store(target + LATENT + half, as_codes(first * factor, LARGEST, kind), mask=inside)
                tl.store(target + LATENT + HALF + half, as_codes(second * factor, LARGEST, kind), mask=inside)
            else:
                tl.store(target + dim, normed.to(kind), mask=dim < LATENT)
                tl.store(target + LATENT + half, first.to(kind), mask=inside)
                tl.store(target + LATENT + HALF + half, second.to(kind), mask=inside)
        else:
            head = (part - 1) * HEADS_TILE + tl.arange(0, HEADS_TILE)
            at = q_ptr + token * q_stride + head[:, None] * (NOPE + ROPE) + NOPE + half[None, :]
            rotate_pairs(at, at, cos[None, :], sin[None, :], (head < HEADS)[:, None] & inside[None, :], HALF)


@triton.jit
def angles_at(rope_ptr, position, half, mask, HALF: tl.constexpr):
    """Return the cosines and sines of a position's angles `half`; 0 where `mask` is False."""
    angles = rope_ptr + position.to(tl.int64) * (2 * HALF) + half
    return tl.load(angles, mask=mask, other=0.0), tl.load(angles + HALF, mask=mask, other=0.0)


@triton.jit
def rotate_pairs(source, target, cos, sin, mask, HALF: tl.constexpr):
    """Rotate the pairs (source[i], source[i + HALF]) and store them at `target`, which may be the same pointer."""
    first, second = rotated_pairs(source, cos, sin, mask, HALF)
    dtype: tl.constexpr = target.dtype.element_ty
    tl.store(target, first.to(dtype), mask=mask)
    tl.store(target + HALF, second.to(dtype), mask=mask)


@triton.jit
def rotated_pairs(source, cos, sin, mask, HALF: tl.constexpr):
    """Return the rotated pairs (source[i], source[i + HALF]) in float32; 0 where `mask` is False."""
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _bits(numbers):
    """Return the largest bits of the absolute numbers; those of NaN are larger than those of any number."""
    return tl.max(tl.abs(numbers).to(tl.int32, bitcast=True), axis=0)
