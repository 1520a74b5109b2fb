"""Kimi Delta Attention of long rows in Triton: the delta rule in chunks of tokens (arXiv:2510.26692), convolved inputs.

One program computes some values of one head of a row, chunk after chunk, and carries the state from one chunk to the
next in float32. With the sums G of a chunk's logarithmic decays, tokens i and j, and the state S before the chunk:

    u_i = b_i·(v_i - Sᵀ·(exp(G_i)·k_i) - Σ over j < i of (k_i·exp(G_i - G_j)·k_j) u_j)
    o_i =            Sᵀ·(exp(G_i)·q_i) + Σ over j ≤ i of (q_i·exp(G_i - G_j)·k_j) u_j

The products with S are matrix products of inputs in the model's dtype. Those of two tokens of a chunk are sums over
channels in float32: exp(G_i - G_j) is at most 1, but its factors exp(G_i) and exp(-G_j) may leave the range of float32.
"""

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.config.state_layers import KimiDeltaAttention
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.latent.triton_products import dot
from tandem.engine.kernels.layers import RecurrentLayer
from tandem.engine.kernels.states.projections import RowSpan, projections_of
from tandem.engine.kernels.states.triton_recurrence import softplus
from tandem.engine.kernels.triton_launch import INTERPRETED, launch_dependents, wait_for_inputs

_CHUNK = 16
"""The number of tokens of a chunk: the least size of the tiles of `tl.dot`, because each token takes a pass."""
_VALUES = 32
"""The maximum number of values of a program, as in `scan`."""


def channel_delta(
    convolved: Tensor, projected: Tensor, layer: RecurrentLayer, cache: StateCache, layout: StepLayout, span: RowSpan,
    out: Tensor, *, pdl: bool,
) -> None:  # fmt: skip
    """Compute the outputs of the rows of `span` before gate and norm, and write their states.

    convolved has q, k and v of the rows as `convolve` writes them. projected [T, sum(projected)] and
    out [T - span.first, inner] are contiguous. Nothing is written for padding rows.
    """
    spec, places, states = layer.spec, projections_of(layer.spec), cache.states
    assert isinstance(spec, KimiDeltaAttention)
    assert states is not None
    block = max(_CHUNK, min(triton.next_power_of_2(spec.head_dim), _VALUES))
    _channel_delta[(span.rows, spec.heads, triton.cdiv(spec.head_dim, block))](
        convolved,
        projected,
        layer.decay_log,
        layer.step_bias,
        states[:, layer.index],
        layout.state_pages,
        layout.row_starts,
        out,
        projected.stride(0),
        states.stride(0),
        states.stride(2),
        span.first,
        len(projected) - span.first,
        spec.head_dim**-0.5,
        HEADS=spec.heads,
        DIM=spec.head_dim,
        STEP=places.step,
        DECAY=places.decay,
        CHUNK=_CHUNK,
        BLOCK_K=max(_CHUNK, triton.next_power_of_2(spec.head_dim)),
        BLOCK_V=block,
        WIDE_DOT=INTERPRETED,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["first_row", "tokens"])
def _channel_delta(
    convolved_ptr,
    projected_ptr,
    decay_ptr,
    step_bias_ptr,
    states_ptr,
    pages_ptr,
    starts_ptr,
    out_ptr,
    row_stride,
    state_page,
    state_head,
    first_row,
    tokens,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    STEP: tl.constexpr,
    DECAY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WIDE_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, head, block) computes a block of the head's values for all tokens of the row."""
    launch_dependents(PDL)
    INNER: tl.constexpr = HEADS * DIM
    row, head = tl.program_id(0) + first_row, tl.program_id(1)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    key_inside, inside = key < DIM, value < DIM
    held = key_inside[:, None] & inside[None, :]
    rate = -tl.exp(tl.load(decay_ptr + head))
    step_bias = tl.load(step_bias_ptr + head * DIM + key, mask=key_inside, other=0.0)
    wait_for_inputs(PDL)
    read = tl.load(pages_ptr + 2 * row).to(tl.int64)
    write = tl.load(pages_ptr + 2 * row + 1).to(tl.int64)
    if write < 0:
        return
    start, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    place = head * state_head + key[:, None] * DIM + value[None, :]
    state = tl.load(states_ptr + tl.maximum(read, 0) * state_page + place, mask=held & (read >= 0), other=0.0)
    q_ptr = convolved_ptr + head * DIM
    k_ptr = q_ptr + tl.cast(tokens, tl.int64) * INNER
    v_ptr = k_ptr + tl.cast(tokens, tl.int64) * INNER
    number = tl.arange(0, CHUNK)
    for chunk in range(start, end, CHUNK):
        token = (chunk + number).to(tl.int64)
        valid = token < end
        wanted = valid[:, None] & key_inside[None, :]
        mine = (token - first_row)[:, None] * INNER
        rounded = tl.load(k_ptr + mine + key[None, :], mask=wanted, other=0.0)
        q = tl.load(q_ptr + mine + key[None, :], mask=wanted, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + mine + value[None, :], mask=valid[:, None] & inside[None, :], other=0.0).to(tl.float32)
        k = rounded.to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, 1) + 1e-6)[:, None] * scale
        k *= tl.rsqrt(tl.sum(k * k, 1) + 1e-6)[:, None]
        own = projected_ptr + token * row_stride
        dt = tl.load(own[:, None] + DECAY + head * DIM + key[None, :], mask=wanted, other=0.0).to(tl.float32)
        # Tokens after the row's last one leave the state as it is.
        log_decay = tl.where(wanted, rate * softplus(dt + step_bias[None, :]), 0.0)
        step = tl.sigmoid(tl.load(own + STEP + head, mask=valid, other=0.0).to(tl.float32))
        total, last = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
        since_start, before = tl.exp(total), state.to(rounded.dtype)
        nothing = tl.zeros((CHUNK, BLOCK_V), tl.float32)
        added = step[:, None] * (v - dot((k * since_start).to(rounded.dtype), before, nothing, WIDE_DOT))
        mixed = dot((q * since_start).to(rounded.dtype), before, nothing, WIDE_DOT)
        for current in range(CHUNK):
            chosen, earlier = (number == current)[:, None], number < current
            difference = tl.sum(tl.where(chosen, total, 0.0), 0)[None, :] - total
            # Differences of later tokens are masked before exp, because they may overflow there.
            decayed = k * tl.exp(tl.where((number <= current)[:, None], difference, -float("inf")))
            on_key = tl.sum(decayed * tl.sum(tl.where(chosen, k, 0.0), 0)[None, :], 1)
            on_query = tl.sum(decayed * tl.sum(tl.where(chosen, q, 0.0), 0)[None, :], 1)
            known = tl.sum(tl.where(earlier, on_key, 0.0)[:, None] * added, 0)
            added = tl.where(chosen, added - step[:, None] * known[None, :], added)
            mixed = tl.where(chosen, mixed + tl.sum(on_query[:, None] * added, 0)[None, :], mixed)
        kept = (k * tl.exp(last[None, :] - total)).to(rounded.dtype)
        state = dot(tl.trans(kept), added.to(rounded.dtype), tl.exp(last)[:, None] * state, WIDE_DOT)
        at = mine + head * DIM + value[None, :]
        tl.store(out_ptr + at, mixed.to(out_ptr.dtype.element_ty), mask=valid[:, None] & inside[None, :])
    tl.store(states_ptr + write * state_page + place, state, mask=held)
