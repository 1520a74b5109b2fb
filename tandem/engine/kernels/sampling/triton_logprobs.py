"""Log probabilities of sampled tokens and of each row's most likely tokens, from the unmodified logits of the model."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.kernels.sampling.triton_sampling import pack, unpack_logit, unpack_token
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs
from tandem.protocol.messages import LOGPROBS_MAX

MOST_TOP = LOGPROBS_MAX
"""Maximum number of tokens that are reported in addition to the sampled one."""
BLOCK, BLOCK_WARPS = 4096, 8
MERGE_WARPS = 4
NOTHING = tl.constexpr(-(1 << 63))
"""A number below every packed logit."""


def logprobs(logits: Tensor, tokens: Tensor, rows: Tensor, top: int, *, pdl: bool) -> tuple[Tensor, Tensor]:
    """Return the log probabilities of the sampled token and of the `top` ≤ MOST_TOP most likely tokens of some rows.

    logits [R, V]; tokens [R] int64, the sampled token of each row; rows [S] int64, the indices of the rows to compute.
    Temperature, filters and penalties do not change the result. Returns the log probabilities [S, 1 + top] float32,
    first that of the sampled token, then those of the most likely tokens by falling logit and rising id, and the ids of
    the most likely tokens [S, top] int64. Does not wait for the device.
    """
    count, vocab = len(rows), logits.shape[1]
    assert 0 <= top <= min(MOST_TOP, vocab), f"top must be from 0 to {min(MOST_TOP, vocab)}"
    blocks = triton.cdiv(vocab, BLOCK)
    sums = torch.empty(count, blocks, 2, dtype=torch.float32, device=logits.device)
    best = torch.empty(count, blocks, max(top, 1), dtype=torch.int64, device=logits.device)
    values = torch.empty(count, 1 + top, dtype=torch.float32, device=logits.device)
    ids = torch.empty(count, top, dtype=torch.int64, device=logits.device)
    _sum_block[(count, blocks)](
        logits,
        logits.stride(0),
        rows,
        sums,
        best,
        vocab,
        top,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=BLOCK_WARPS,
        launch_pdl=pdl,
    )
    _merge_blocks[(count,)](
        logits,
        logits.stride(0),
        rows,
        tokens,
        sums,
        best,
        values,
        ids,
        blocks,
        top,
        BLOCKS=triton.next_power_of_2(blocks),
        # One size for any `top`, so that no value of it compiles a kernel while requests wait.
        KEYS=triton.next_power_of_2(blocks * MOST_TOP),
        PDL=pdl,
        num_warps=MERGE_WARPS,
        launch_pdl=pdl,
    )
    return values, ids


@triton.jit(do_not_specialize=["top"])
def _sum_block(
    logits_ptr, logits_stride, rows_ptr, sums_ptr, best_ptr, vocab, top, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Compute a block's maximum and sum of exponentials → sums [S, blocks, 2], and its largest logits → best.

    best [S, blocks, top] int64 are the `top` largest packed logits.
    """
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    place, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + place)
    part = place * tl.num_programs(1) + block
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    logits = tl.load(logits_ptr + row * logits_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    largest = tl.max(logits, axis=0)
    # A block in which all logits are -inf has no finite maximum to subtract.
    base = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(sums_ptr + part * 2, base)
    tl.store(sums_ptr + part * 2 + 1, tl.sum(tl.exp(logits - base), axis=0))
    packed = tl.where(inside, pack(logits, column), NOTHING)
    number = 0
    while number < top:
        best = tl.max(packed, axis=0)
        tl.store(best_ptr + part * top + number, best)
        packed = tl.where(packed == best, NOTHING, packed)
        number += 1


@triton.jit(do_not_specialize=["top"])
def _merge_blocks(
    logits_ptr,
    logits_stride,
    rows_ptr,
    tokens_ptr,
    sums_ptr,
    best_ptr,
    values_ptr,
    ids_ptr,
    blocks,
    top,
    BLOCKS: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + place)
    block = tl.arange(0, BLOCKS)
    part_ptr = sums_ptr + (place * blocks + block) * 2
    base = tl.load(part_ptr, mask=block < blocks, other=float("-inf"))
    sums = tl.load(part_ptr + 1, mask=block < blocks, other=0.0)
    largest = tl.max(base, axis=0)
    log_total = largest + tl.log(tl.sum(sums * tl.exp(base - largest), axis=0))
    token = tl.maximum(tl.load(tokens_ptr + row), 0)  # no one reads the result of a row without a token
    values_ptr += place * (1 + top)
    tl.store(values_ptr, tl.load(logits_ptr + row * logits_stride + token).to(tl.float32) - log_total)
    key = tl.arange(0, KEYS)
    packed = tl.load(best_ptr + place * blocks * top + key, mask=key < blocks * top, other=NOTHING)
    number = 0
    while number < top:
        best = tl.max(packed, axis=0)
        tl.store(values_ptr + 1 + number, unpack_logit(best) - log_total)
        tl.store(ids_ptr + place * top + number, unpack_token(best))
        packed = tl.where(packed == best, NOTHING, packed)
        number += 1
