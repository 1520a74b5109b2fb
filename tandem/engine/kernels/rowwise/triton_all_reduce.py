"""One-shot all-reduce: every rank reads the parts of all ranks directly from their GPUs' memory, and adds them up.

One kernel copies the rank's own part to memory that the other GPUs can read, waits until all ranks have done so, and
adds the parts in the order of the ranks, so that all ranks get the same bits. For sizes of decode steps this takes one
exchange of signals over NVLink, where NCCL's ring takes several.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.kernels.triton_launch import launch_dependents, overlaps_launches, wait_for_inputs

PROGRAMS = 64
"""The number of programs of every launch; all run at the same time, because they wait for those of other ranks."""
_BLOCK = 2048
"""The number of elements that a program adds at a time."""


class OneShot:
    """The one-shot all-reduce of one rank.

    The parts lie in two halves of each rank's shared memory, which calls use alternately. A rank writes to a half again
    only after the signals of the call between have shown that all ranks have read it.
    """

    def __init__(self, number: int, buffers: Tensor, signals: Tensor, half_bytes: int) -> None:
        """Create the all-reduce of rank `number`.

        `buffers` and `signals` [ranks] int64, on this rank's device, are the addresses of each rank's memory:
        2 · `half_bytes` for the parts, and [PROGRAMS, ranks] int32 for signals, which are 0 at first.
        """
        self._number = number
        self._buffers, self._signals, self._half_bytes = buffers, signals, half_bytes
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int32, device=buffers.device)
        """The number of earlier calls, modulo 2^32; each program counts them for itself."""
        self._pdl = overlaps_launches()

    def add_sum(self, part: Tensor, total: Tensor | None) -> None:
        """Add the sum of `part` over all ranks to `total` in place; with `total` None, replace `part` by the sum.

        `part` has at most the bytes of a half.
        """
        _all_reduce_kernel[PROGRAMS,](
            part,
            part if total is None else total,
            self._buffers,
            self._signals,
            self._calls,
            part.numel(),
            self._half_bytes // part.element_size(),
            RANK=self._number,
            RANKS=len(self._buffers),
            ADD=total is not None,
            BLOCK=_BLOCK,
            PDL=self._pdl,
            num_warps=8,
            launch_pdl=self._pdl,
        )


@triton.jit
def _all_reduce_kernel(
    part_ptr,
    total_ptr,
    buffers_ptr,
    signals_ptr,
    calls_ptr,
    count,
    half,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    program = tl.program_id(0)
    stride = tl.num_programs(0) * BLOCK
    columns = tl.arange(0, BLOCK)
    dtype = part_ptr.dtype.element_ty
    wait_for_inputs(PDL)
    call = tl.load(calls_ptr + program) + 1
    start_of_half = (call & 1) * half
    own = tl.load(buffers_ptr + RANK).to(tl.pointer_type(dtype)) + start_of_half
    for start in tl.range(program * BLOCK, count, stride):
        inside = start + columns < count
        tl.store(own + start + columns, tl.load(part_ptr + start + columns, inside), inside)
    # All threads have stored before one of them signals.
    tl.debug_barrier()
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            signals = tl.load(signals_ptr + rank).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(signals + program * RANKS + RANK, call, sem="release", scope="sys")
    own_signals = tl.load(signals_ptr + RANK).to(tl.pointer_type(tl.int32)) + program * RANKS
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            # Another rank may be one call ahead. The difference is right even after the numbers have wrapped around.
            while tl.atomic_add(own_signals + rank, 0, sem="acquire", scope="sys") - call < 0:
                pass
    tl.debug_barrier()
    for start in tl.range(program * BLOCK, count, stride):
        inside = start + columns < count
        sum_ = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(RANKS):
            other = tl.load(buffers_ptr + rank).to(tl.pointer_type(dtype)) + start_of_half
            sum_ += tl.load(other + start + columns, inside, other=0, cache_modifier=".cg").to(tl.float32)
        if ADD:
            # Rounded to the dtype first, as a sum over NCCL is, so that the result does not depend on the size.
            total = tl.load(total_ptr + start + columns, inside, other=0).to(tl.float32)
            sum_ = total + sum_.to(dtype).to(tl.float32)
        tl.store(total_ptr + start + columns, sum_.to(total_ptr.dtype.element_ty), inside)
    tl.store(calls_ptr + program, call)
