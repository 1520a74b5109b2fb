"""The rows of the embedding table for token ids that the host knows, and for ids that only the device knows so far."""

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs

MOST_COLUMNS = 2048
"""Maximum number of columns of a program."""
ELEMENTS_PER_WARP = 512
"""Number of elements of a warp: two 16-byte loads of a half-precision type for each thread."""


def embed(token_ids: Tensor, sources: Tensor | None, previous: Tensor | None, table: Tensor, *, pdl: bool) -> Tensor:
    """Return the rows of table [V, H] for the step's tokens → [T, H].

    The id of token t is previous[sources[t]] if sources[t] ≥ 0, else token_ids[t]. `previous` has ids that an earlier
    step has sampled and the host has not read yet; NO_TOKEN counts as 0. token_ids [T] int64, sources [T] int32,
    previous int64 of any length. Without `sources` and `previous` all ids are in token_ids.

    This launch begins a step and does not overlap with the launch before it. So the kernels that prepare the step have
    ended before any later kernel runs, even one that reads before it waits. With `pdl` the next launch overlaps with
    this one.
    """
    tokens, width = token_ids.shape[0], table.shape[1]
    out = table.new_empty(tokens, width)
    block = min(triton.next_power_of_2(width), MOST_COLUMNS)
    drawn = sources is not None and previous is not None
    _embed[(tokens, triton.cdiv(width, block))](
        token_ids,
        sources if drawn else token_ids,
        previous if drawn else token_ids,
        table,
        out,
        width,
        DRAWN=drawn,
        BLOCK=block,
        PDL=pdl,
        num_warps=max(block // ELEMENTS_PER_WARP, 1),
    )
    return out


@triton.jit
def _embed(
    ids_ptr,
    sources_ptr,
    previous_ptr,
    table_ptr,
    out_ptr,
    width,
    DRAWN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(ids_ptr + token)
    if DRAWN:
        source = tl.load(sources_ptr + token)
        drawn = tl.maximum(tl.load(previous_ptr + source, mask=source >= 0, other=0), 0)
        row = tl.where(source >= 0, drawn, row)
    values = tl.load(table_ptr + row * width + column, mask=inside)
    tl.store(out_ptr + token.to(tl.int64) * width + column, values, mask=inside)
