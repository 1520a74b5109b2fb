"""One-shot all-reduce: every rank sends its part to all ranks directly over NVLink, and adds the parts that arrive.

Each 32-bit word is sent with the number of the call, as one 64-bit word. The receiver waits until the number of the
call stands beside every word, so a sum takes the time of one write over NVLink, without any other signal. NCCL's
low-latency protocol does the same; both rely on GPUs to store 64 bits at once. The parts are added in the order of the
ranks, so that all ranks get the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.kernels.triton_launch import launch_dependents, overlaps_launches, wait_for_inputs

PROGRAMS = 256
"""The number of programs of every launch. All of them count the calls, so the number must not change."""
_BLOCK = 512
"""The number of 32-bit words that a program sends or adds at a time."""


class OneShot:
    """The one-shot all-reduce of one rank.

    The ranks' parts arrive in two halves of the rank's memory, which calls use alternately. A rank writes to a half
    again two calls later: by then it has received the parts of the call between, which the other ranks sent only after
    they had read this half.
    """

    def __init__(self, number: int, buffers: Tensor, most_bytes: int) -> None:
        """Create the all-reduce of rank `number`.

        `buffers` [ranks] int64, on this rank's device, has the address of each rank's memory: `buffer_bytes`, which are
        0 at first. `most_bytes` is the maximum size of a part.
        """
        self._number = number
        self._buffers = buffers
        self._most_words = most_bytes // 4
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int32, device=buffers.device)
        """The number of earlier calls, modulo 2^32; each program counts them for itself.

        A word that arrived exactly 2^32 calls ago, more than a day, would be taken for a new one. The words of decode
        steps are overwritten long before.
        """
        self._pdl = overlaps_launches()

    def add_sum(self, part: Tensor, total: Tensor | None) -> None:
        """Add the sum of `part` over all ranks to `total` in place; with `total` None, replace `part` by the sum.

        The bytes of `part` are a multiple of 4, at most `most_bytes`.
        """
        _all_reduce_kernel[PROGRAMS,](
            part.view(torch.int32),
            (part if total is None else total).view(torch.int32),
            self._buffers,
            self._calls,
            part.nbytes // 4,
            self._most_words,
            RANK=self._number,
            RANKS=len(self._buffers),
            DTYPE=getattr(tl, str(part.dtype).removeprefix("torch.")),
            ADD=total is not None,
            BLOCK=_BLOCK,
            PDL=self._pdl,
            num_warps=4,
            launch_pdl=self._pdl,
        )


def buffer_bytes(most_bytes: int, ranks: int) -> int:
    """Return the size of each rank's memory for parts of up to `most_bytes`: two halves, 64 bits for each 32."""
    return 4 * most_bytes * ranks


@triton.jit
def _all_reduce_kernel(
    part_ptr,
    total_ptr,
    buffers_ptr,
    calls_ptr,
    words,
    most_words,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    DTYPE: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    program = tl.program_id(0)
    stride = tl.num_programs(0) * BLOCK
    columns = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    call = tl.load(calls_ptr + program) + 1
    mark = call.to(tl.int64) << 32
    half = (call & 1).to(tl.int64) * most_words * RANKS
    for start in tl.range(program * BLOCK, words, stride):
        inside = start + columns < words
        word = tl.load(part_ptr + start + columns, inside, other=0)
        marked = mark | (word.to(tl.int64) & 0xFFFFFFFF)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                buffer = tl.load(buffers_ptr + rank).to(tl.pointer_type(tl.int64)) + half + RANK * most_words
                tl.store(buffer + start + columns, marked, inside)
    own = tl.load(buffers_ptr + RANK).to(tl.pointer_type(tl.int64)) + half
    for start in tl.range(program * BLOCK, words, stride):
        inside = start + columns < words
        low = tl.zeros([BLOCK], tl.float32)
        high = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                word = tl.load(part_ptr + start + columns, inside, other=0)
            else:
                arriving = own + rank * most_words + start + columns
                marked = tl.load(arriving, inside, other=0, volatile=True)
                while tl.max((inside & ((marked >> 32).to(tl.int32) != call)).to(tl.int32), 0) != 0:
                    marked = tl.load(arriving, inside, other=0, volatile=True)
                word = marked.to(tl.int32)
            low += _low(word, DTYPE)
            high += _high(word, DTYPE)
        if ADD:
            # The sum is rounded first, as NCCL's is, so that the result does not depend on the number of tokens.
            word = tl.load(total_ptr + start + columns, inside, other=0)
            low = _low(word, DTYPE) + low.to(DTYPE).to(tl.float32)
            high = _high(word, DTYPE) + high.to(DTYPE).to(tl.float32)
        tl.store(total_ptr + start + columns, _word(low, high, DTYPE), inside)
    tl.store(calls_ptr + program, call)


@triton.jit
def _low(word, DTYPE: tl.constexpr):
    """Return the first number of each word as float32: the only one, or the lower 16 bits."""
    if DTYPE.primitive_bitwidth == 32:
        number = word.to(tl.float32, bitcast=True)
    else:
        number = (word & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _high(word, DTYPE: tl.constexpr):
    """Return the second number of each word as float32, 0 if the numbers have 32 bits."""
    if DTYPE.primitive_bitwidth == 32:
        number = tl.zeros_like(word).to(tl.float32)
    else:
        number = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _word(low, high, DTYPE: tl.constexpr):
    """Return the words of the numbers `low` and `high`, rounded to the dtype."""
    if DTYPE.primitive_bitwidth == 32:
        word = low.to(tl.int32, bitcast=True)
    else:
        lower = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16) | lower
    return word
