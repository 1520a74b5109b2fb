"""The matrix products of absorbed attention: of queries and key matrices, and of mixed latents and value matrices.

Each head has its own matrices, so both are batched products, in which each token is a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.config.attention import LatentShape
from tandem.engine.kernels.triton_launch import INTERPRETED, launch_dependents, wait_for_inputs

_FEW_TOKENS, _MANY_TOKENS = 16, 256
"""Maximum numbers of tokens of a step: the first for programs of 16 tokens, the second for `_NARROW` columns.

In these steps, there would be too few larger programs to fill the GPU.
"""
_NARROW, _WIDE = 32, 128
"""Number of columns of a program's result, in small and in large steps."""
_INNER = 128
"""Number of elements of a dot product that are multiplied at a time."""


def absorb(q: Tensor, kv_up: Tensor, shape: LatentShape, *, pdl: bool) -> Tensor:
    """Return the absorbed queries, to be multiplied by latents: [q_nope · W_uk | q_rope] → [T, heads, latent + rope].

    q [T, heads, nope + rope], rows may be strided; kv_up [heads, nope + v_dim, latent].
    """
    tokens = len(q)
    out = q.new_empty(tokens, shape.heads, shape.projected)
    tile, columns, warps = _tile(tokens, shape.latent, q.dtype)
    _absorb[(triton.cdiv(tokens, tile), shape.heads, triton.cdiv(shape.latent, columns))](
        q,
        kv_up,
        out,
        q.stride(0),
        tokens,
        HEADS=shape.heads,
        LATENT=shape.latent,
        ROPE=shape.rope,
        ROPE_PADDED=triton.next_power_of_2(shape.rope),
        NOPE=shape.nope,
        NOPE_PADDED=max(triton.next_power_of_2(shape.nope), 16),
        V_DIM=shape.v_dim,
        TOKENS=tile,
        COLUMNS=columns,
        PDL=pdl,
        WIDE_DOT=INTERPRETED,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out


def values_of(mixed: Tensor, kv_up: Tensor, out: Tensor, shape: LatentShape, *, pdl: bool) -> None:
    """Compute out [T, heads·v_dim] = mixed [T, heads, latent] · W_uvᵀ; kv_up is as for `absorb`."""
    tokens = len(mixed)
    tile, columns, warps = _tile(tokens, shape.v_dim, mixed.dtype)
    _values_of[(triton.cdiv(tokens, tile), shape.heads, triton.cdiv(shape.v_dim, columns))](
        mixed,
        kv_up,
        out,
        tokens,
        HEADS=shape.heads,
        LATENT=shape.latent,
        NOPE=shape.nope,
        V_DIM=shape.v_dim,
        TOKENS=tile,
        COLUMNS=columns,
        INNER=min(_INNER, max(triton.next_power_of_2(shape.latent), 16)),
        PDL=pdl,
        WIDE_DOT=INTERPRETED,
        num_warps=warps,
        launch_pdl=pdl,
    )


def _tile(tokens: int, columns: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the number of tokens, of columns and of warps of a program.

    float32 always gets small programs, because it does not use the tensor cores.
    """
    exact = dtype == torch.float32
    most = _NARROW if exact or tokens <= _MANY_TOKENS else _WIDE
    cut = min(most, max(triton.next_power_of_2(columns), 16))
    return (16, cut, 2) if exact or tokens <= _FEW_TOKENS else (64, cut, 4)


@triton.jit
def dot(a, b, acc, WIDE_DOT: tl.constexpr):
    """Return acc + a · b in float32.

    WIDE_DOT is for Triton's interpreter, which cannot multiply bfloat16: the operands are first converted to float32,
    which does not change the products.
    """
    if WIDE_DOT:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens"])
def _absorb(
    q,
    kv_up,
    out,
    q_stride,
    tokens,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_PADDED: tl.constexpr,
    V_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Program (tokens, head, columns of the latent) absorbs queries.

    Programs of the first columns also copy the rotated part of the queries.
    """
    launch_dependents(PDL)
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, NOPE_PADDED)
    matrix = kv_up + head * ((NOPE + V_DIM) * LATENT)
    present = (inner < NOPE)[:, None] & (column < LATENT)[None, :]
    weights = tl.load(matrix + inner[:, None] * LATENT + column[None, :], mask=present, other=0.0)
    wait_for_inputs(PDL)
    real = (token < tokens)[:, None]
    row = q + token[:, None].to(tl.int64) * q_stride + head * (NOPE + ROPE)
    query = tl.load(row + inner[None, :], mask=real & (inner < NOPE)[None, :], other=0.0)
    result = dot(query, weights, tl.zeros([TOKENS, COLUMNS], tl.float32), WIDE_DOT)
    target = out + (token[:, None].to(tl.int64) * HEADS + head) * (LATENT + ROPE)
    tl.store(target + column[None, :], result.to(out.dtype.element_ty), mask=real & (column < LATENT)[None, :])
    if tl.program_id(2) == 0:
        rotated = tl.arange(0, ROPE_PADDED)[None, :]
        copied = real & (rotated < ROPE)
        tl.store(target + LATENT + rotated, tl.load(row + NOPE + rotated, mask=copied, other=0.0), mask=copied)


@triton.jit(do_not_specialize=["tokens"])
def _values_of(
    mixed,
    kv_up,
    out,
    tokens,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    NOPE: tl.constexpr,
    V_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PDL: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Program (tokens, head, columns of the values) computes values from mixed latents."""
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    real, kept = (token < tokens)[:, None], (column < V_DIM)[None, :]
    row = mixed + (token[:, None].to(tl.int64) * HEADS + head) * LATENT
    matrix = kv_up + (head * (NOPE + V_DIM) + NOPE) * LATENT + column[None, :] * LATENT
    result = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for start in tl.range(0, LATENT, INNER):
        inner = start + tl.arange(0, INNER)
        x = tl.load(row + inner[None, :], mask=real & (inner < LATENT)[None, :], other=0.0)
        weights = tl.load(matrix + inner[:, None], mask=kept & (inner < LATENT)[:, None], other=0.0)
        result = dot(x, weights, result, WIDE_DOT)
    target = out + token[:, None].to(tl.int64) * (HEADS * V_DIM) + head * V_DIM + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=real & kept)
