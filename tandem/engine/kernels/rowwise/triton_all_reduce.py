"""All-reduce over NVLink: every rank writes to the memory of the others, and adds what arrives in its own.

Each 32-bit word is sent with the number of the call, as one 64-bit word. The receiver waits until the number of the
call stands beside every word, so a trip takes the time of one write over NVLink, without any other signal. NCCL's
low-latency protocol does the same; both rely on GPUs to store 64 bits at once.

In one shot, every rank sends its part to all ranks, and each adds them. In two, every rank sends each other rank the
words that this rank adds, and then its own sums to all ranks: less is sent, in one more trip. Both add in the order of
the ranks and round the sum to the dtype, so all ranks get the same bits, and in two shots those of one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.kernels.layers import Norm
from tandem.engine.kernels.triton_launch import launch_dependents, overlaps_launches, wait_for_inputs

PROGRAMS = 256
"""The number of programs of every launch. All of them count the calls, so the number must not change."""
_PIECE = 512
"""The number of 32-bit words that a program sends or adds at a time; with a norm it is a row."""
_WORDS_PER_THREAD = 4
_MOST_WARPS = 16


class AllReduce:
    """The all-reduce of one rank.

    What other ranks send arrives in two halves of the rank's memory, which calls use alternately. A rank writes to a
    half again two calls later: by then it has received words of the call between from each other rank, which sent them
    only after it had read this half.
    """

    def __init__(self, number: int, buffers: Tensor, most_bytes: int) -> None:
        """Create the all-reduce of rank `number`.

        `buffers` [ranks] int64, on this rank's device, has the address of each rank's memory, a multiple of 16: it has
        `buffer_bytes`, which are 0 at first. `most_bytes` is the maximum size of a part.
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

    def add_sum(self, part: Tensor, total: Tensor | None, norm: Norm | None = None, *, shots: int) -> Tensor | None:
        """Add the sum of `part` over all ranks to `total` in place; with `total` None, replace `part` by the sum.

        The bytes of `part` are a multiple of 4, at most `most_bytes`. `shots` is 1 or 2, the same on all ranks. If
        `norm` is given, returns RMSNorm of the result's rows, computed in float32 from the rounded result and rounded
        once; the bytes of a row of `part` [T, H] are then a multiple of 4.
        """
        result = part if total is None else total
        normed = None if norm is None else torch.empty_like(result)
        piece = _PIECE if norm is None else result.shape[1] * result.element_size() // 4
        block, ranks = triton.next_power_of_2(piece), len(self._buffers)
        _all_reduce_kernel[PROGRAMS,](
            part.view(torch.int32),
            result.view(torch.int32),
            # Tensors that a variant does not access still need an address.
            result if norm is None else norm.weight,
            (result if normed is None else normed).view(torch.int32),
            self._buffers,
            self._calls,
            part.nbytes // 4,
            self._most_words,
            0.0 if norm is None else norm.eps,
            RANK=self._number,
            RANKS=ranks,
            SHOTS=shots,
            DTYPE=getattr(tl, str(part.dtype).removeprefix("torch.")),
            ADD=total is not None,
            NORM=norm is not None,
            PIECE=piece,
            BLOCK=block,
            SHARE=triton.cdiv(piece, ranks),
            PDL=self._pdl,
            num_warps=min(max(block // (_WORDS_PER_THREAD * 32), 1), _MOST_WARPS),
            launch_pdl=self._pdl,
        )
        return normed


def buffer_bytes(most_bytes: int, ranks: int) -> int:
    """Return the size of each rank's memory for parts of up to `most_bytes`: two halves, 64 bits for each 32."""
    return 4 * most_bytes * ranks


@triton.jit
def _all_reduce_kernel(
    part_ptr,
    total_ptr,
    norm_ptr,
    normed_ptr,
    buffers_ptr,
    calls_ptr,
    words,
    most_words,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SHOTS: tl.constexpr,
    DTYPE: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum PIECE words at a time, of which each rank adds SHARE if there are two shots; grid (PROGRAMS,).

    A half of a rank's memory has `most_words` words for each sender, which writes each of its words at its index.
    """
    launch_dependents(PDL)
    first = tl.program_id(0) * PIECE
    stride = tl.num_programs(0) * PIECE
    columns = tl.arange(0, BLOCK)
    owner = columns // SHARE
    RATIO: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    if NORM:
        # No earlier kernel writes a weight, so it is loaded while the kernel before still runs.
        low_scale = tl.load(norm_ptr + columns * RATIO, columns < PIECE, other=0.0).to(tl.float32)
        high_scale = tl.load(norm_ptr + columns * RATIO + RATIO - 1, columns < PIECE, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    call = tl.load(calls_ptr + tl.program_id(0)) + 1
    half = (call & 1).to(tl.int64) * most_words * RANKS
    own = _memory(buffers_ptr, RANK, half)
    for start in tl.range(first, words, stride):
        at = start + columns
        inside = (columns < PIECE) & (at < words)
        marked = _marked(tl.load(part_ptr + at, inside, other=0), call)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                sent = inside if SHOTS == 1 else inside & (owner == rank)
                tl.store(_memory(buffers_ptr, rank, half) + RANK * most_words + at, marked, sent)
    if SHOTS == 2:
        mine = RANK * SHARE + tl.arange(0, triton.next_power_of_2(SHARE))
        for start in tl.range(first, words, stride):
            at = start + mine
            inside = (mine < (RANK + 1) * SHARE) & (mine < PIECE) & (at < words)
            low, high = _summed(part_ptr, own, at, inside, call, most_words, RANK, RANKS, DTYPE)
            marked = _marked(_word(low, high, DTYPE), call)
            for rank in tl.static_range(RANKS):
                tl.store(_memory(buffers_ptr, rank, half) + RANK * most_words + at, marked, inside)
    for start in tl.range(first, words, stride):
        at = start + columns
        inside = (columns < PIECE) & (at < words)
        if SHOTS == 1:
            low, high = _summed(part_ptr, own, at, inside, call, most_words, RANK, RANKS, DTYPE)
        else:
            word = _received(own + owner * most_words + at, inside, call)
            low = _low(word, DTYPE)
            high = _high(word, DTYPE)
        if ADD:
            # The sum is rounded first, as NCCL's is, so that the result does not depend on the number of tokens.
            word = tl.load(total_ptr + at, inside, other=0)
            low = _low(word, DTYPE) + low.to(DTYPE).to(tl.float32)
            high = _high(word, DTYPE) + high.to(DTYPE).to(tl.float32)
        word = _word(low, high, DTYPE)
        tl.store(total_ptr + at, word, inside)
        if NORM:
            low = _low(word, DTYPE)
            high = _high(word, DTYPE)
            scale = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / (PIECE * RATIO) + eps)
            tl.store(normed_ptr + at, _word(low * scale * low_scale, high * scale * high_scale, DTYPE), inside)
    tl.store(calls_ptr + tl.program_id(0), call)


@triton.jit
def _memory(buffers_ptr, rank: tl.constexpr, half):
    """Return the address of a half of a rank's memory. It is aligned, so that a thread stores two words at once."""
    return tl.multiple_of(tl.load(buffers_ptr + rank).to(tl.pointer_type(tl.int64)), 16) + half


@triton.jit
def _summed(
    part_ptr,
    own,
    at,
    inside,
    call,
    most_words,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return the sums of both numbers of the words `at`: this rank's in `part_ptr`, the others' as they arrive."""
    low = tl.zeros(at.shape, tl.float32)
    high = tl.zeros(at.shape, tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            word = tl.load(part_ptr + at, inside, other=0)
        else:
            word = _received(own + rank * most_words + at, inside, call)
        low += _low(word, DTYPE)
        high += _high(word, DTYPE)
    return low, high


@triton.jit
def _marked(word, call):
    """Return the 64-bit words to send: each word, with the number of the call in the upper half."""
    return call.to(tl.int64) << 32 | (word.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _received(arriving, inside, call):
    """Wait until the words at `arriving` are those of this call, and return them."""
    marked = tl.load(arriving, inside, other=0, volatile=True)
    while tl.max((inside & ((marked >> 32).to(tl.int32) != call)).to(tl.int32), 0) != 0:
        marked = tl.load(arriving, inside, other=0, volatile=True)
    return marked.to(tl.int32)


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
