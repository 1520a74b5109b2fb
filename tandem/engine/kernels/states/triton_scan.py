"""Mamba-2 of long rows in Triton: the chunked scan of arXiv:2405.21060, section 6, over convolved inputs.

One program computes some values of one head of a row, chunk after chunk. Within a chunk all tokens are computed by
matrix products of inputs in the model's dtype; the state is carried from one chunk to the next in float32.
"""

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.config.state_layers import Mamba2
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.latent.triton_products import dot
from tandem.engine.kernels.layers import RecurrentLayer
from tandem.engine.kernels.states.projections import RowSpan, projections_of
from tandem.engine.kernels.states.triton_recurrence import softplus
from tandem.engine.kernels.triton_launch import INTERPRETED, launch_dependents, wait_for_inputs

_CHUNK = 64
"""The number of tokens of a chunk."""
_VALUES = 32
"""The maximum number of values of a program: with more, its registers would spill."""
_LEAST = 16
"""The least size of the tiles of `tl.dot`."""


def scan(
    convolved: Tensor, projected: Tensor, layer: RecurrentLayer, cache: StateCache, layout: StepLayout, span: RowSpan,
    out: Tensor, *, pdl: bool,
) -> None:  # fmt: skip
    """Compute the outputs of the rows of `span` before gate and norm, and write their states.

    convolved has x, B and C of the rows as `convolve` writes them. projected [T, sum(projected)] and
    out [T - span.first, inner] are contiguous. Nothing is written for padding rows.
    """
    spec, states = layer.spec, cache.states
    assert isinstance(spec, Mamba2)
    assert states is not None
    heads = spec.state.heads
    block = max(_LEAST, min(triton.next_power_of_2(spec.head_dim), _VALUES))
    _scan[(span.rows, spec.heads, triton.cdiv(spec.head_dim, block))](
        convolved,
        projected,
        layer.decay_log,
        layer.step_bias,
        layer.skip,
        states[:, layer.index],
        layout.state_pages,
        layout.row_starts,
        out,
        projected.stride(0),
        states.stride(0),
        states.stride(2),
        span.first,
        len(projected) - span.first,
        spec.least_step,
        HEADS=heads,
        SHARED=spec.heads // heads,
        KEY_DIM=spec.state_dim,
        VALUE_DIM=spec.head_dim,
        DECAY=projections_of(spec).decay,
        CHUNK=_CHUNK,
        BLOCK_K=max(_LEAST, triton.next_power_of_2(spec.state_dim)),
        BLOCK_V=block,
        WIDE_DOT=INTERPRETED,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
        num_stages=2,
    )


@triton.jit(do_not_specialize=["first_row", "tokens"])
def _scan(
    convolved_ptr,
    projected_ptr,
    decay_ptr,
    step_bias_ptr,
    skip_ptr,
    states_ptr,
    pages_ptr,
    starts_ptr,
    out_ptr,
    row_stride,
    state_page,
    state_head,
    first_row,
    tokens,
    least_step,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WIDE_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, head, block) computes a block of the head's values for all tokens of the row."""
    launch_dependents(PDL)
    INNER: tl.constexpr = HEADS * SHARED * VALUE_DIM
    KEYS: tl.constexpr = HEADS * KEY_DIM
    row, head = tl.program_id(0) + first_row, tl.program_id(1)
    group, member = head // SHARED, head % SHARED
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    key_inside, inside = key < KEY_DIM, value < VALUE_DIM
    held = key_inside[:, None] & inside[None, :]
    rate = -tl.exp(tl.load(decay_ptr + head))
    step_bias, skip = tl.load(step_bias_ptr + head), tl.load(skip_ptr + head)
    wait_for_inputs(PDL)
    read = tl.load(pages_ptr + 2 * row).to(tl.int64)
    write = tl.load(pages_ptr + 2 * row + 1).to(tl.int64)
    if write < 0:
        return
    start, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    place = group * state_head + member * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
    state = tl.load(states_ptr + tl.maximum(read, 0) * state_page + place, mask=held & (read >= 0), other=0.0)
    count = tl.cast(tokens, tl.int64)
    x_ptr = convolved_ptr + head * VALUE_DIM
    b_ptr = convolved_ptr + count * INNER + group * KEY_DIM
    c_ptr = b_ptr + count * KEYS
    number = tl.arange(0, CHUNK)
    earlier = number[:, None] >= number[None, :]
    for chunk in range(start, end, CHUNK):
        token = (chunk + number).to(tl.int64)
        valid = token < end
        mine = token - first_row
        keys = mine[:, None] * KEYS + key[None, :]
        c = tl.load(c_ptr + keys, mask=valid[:, None] & key_inside[None, :], other=0.0)
        b = tl.load(b_ptr + keys, mask=valid[:, None] & key_inside[None, :], other=0.0)
        x = tl.load(x_ptr + mine[:, None] * INNER + value[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
        dt = (
            tl.load(projected_ptr + token * row_stride + DECAY + head, mask=valid, other=0.0).to(tl.float32) + step_bias
        )
        dt = tl.maximum(softplus(dt), least_step)
        # Tokens after the row's last one leave the state as it is.
        dt = tl.where(valid, dt, 0.0)
        total = tl.cumsum(rate * dt, 0)
        last = tl.sum(rate * dt, 0)
        # Differences above the diagonal are masked before exp, because they may overflow there.
        between = tl.exp(tl.where(earlier, total[:, None] - total[None, :], 0.0))
        scores = dot(c, tl.trans(b), tl.zeros((CHUNK, CHUNK), tl.float32), WIDE_DOT)
        scores *= tl.where(earlier, between * dt[None, :], 0.0)
        mixed = dot(c, state.to(c.dtype), tl.zeros((CHUNK, BLOCK_V), tl.float32), WIDE_DOT) * tl.exp(total)[:, None]
        mixed = dot(scores.to(x.dtype), x, mixed, WIDE_DOT) + skip * x.to(tl.float32)
        added = (b.to(tl.float32) * (tl.exp(last - total) * dt)[:, None]).to(x.dtype)
        state = dot(tl.trans(added), x, tl.exp(last) * state, WIDE_DOT)
        at = mine[:, None] * INNER + head * VALUE_DIM + value[None, :]
        tl.store(out_ptr + at, mixed.to(out_ptr.dtype.element_ty), mask=valid[:, None] & inside[None, :])
    tl.store(states_ptr + write * state_page + place, state, mask=held)
