"""The threads of the CPU kernels, which run one job at a time, divided into chunks that free threads take.

A job takes microseconds, so threads must receive it in less than one microsecond. The caller writes the job into shared
memory, publishes it with one store, and works on its chunks like the helper threads. No thread has a fixed share, so a
thread that is preempted or still asleep delays the job by one chunk and not by half of it.

Between jobs helper threads spin for a moment, because the jobs of a step follow each other closely, and then sleep on
an event; `Pool.write` wakes them. A helper that falls asleep just as a job is published misses only that job.

The ticket word holds generation << 32 | chunks left. The thread whose compare-and-swap of the ticket takes a chunk owns
the chunk; the compare-and-swap fails if another job has been published in between. The caller continues when the
FINISHED word counts all chunks.
"""

import os
import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

TICKET, FINISHED, SLEEPING, STOP = 0, 8, 16, 24
"""Indices of the words of the shared memory that all threads access, each on a separate cache line."""
JOB = 32
"""Index of the job's first word, which holds the operation; the operation's arguments follow."""
CHUNKS = 30
"""The index of the argument that holds the number of chunks of the current job."""
SHARED_WORDS = 96
REALS = 64
"""Index of the first word of the job's float arguments."""
CHUNK_SCRATCH_BYTES = 1 << 19
"""Size in bytes of each thread's private memory, which it uses for one chunk at a time."""

_SPINS_BEFORE_SLEEP = 200_000
_SPINS_BEFORE_YIELD = 2_000


@intrinsic
def atomic_load(typingctx, address):  # type: ignore[no-untyped-def]
    """Load the int64 at `address` (acquire): what its writer wrote before is visible afterwards."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Store the int64 at `address` (release): a thread that reads it also sees this thread's earlier writes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def atomic_add(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Add to the int64 at `address`, and return its former value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def compare_and_swap(typingctx, address, expected, value):  # type: ignore[no-untyped-def]
    """Store `value` at `address` if it holds `expected`, and return True if it did."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        pair = builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def argument(typingctx, shared, index):  # type: ignore[no-untyped-def]
    """Return an integer argument of the current job."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_argument_pointer(builder, args[0], args[1], ir.IntType(64)))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def real(typingctx, shared, index):  # type: ignore[no-untyped-def]
    """Return a float64 argument of the current job, as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = builder.load(_argument_pointer(builder, args[0], args[1], ir.DoubleType()))
        return builder.fptrunc(wide, ir.FloatType())

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def set_argument(typingctx, shared, index, value):  # type: ignore[no-untyped-def]
    """Change an integer argument of the job before the job is published."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _argument_pointer(builder, args[0], args[1], ir.IntType(64)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _argument_pointer(builder: Any, shared: Any, index: Any, kind: Any) -> Any:
    word = builder.add(index, ir.IntType(64)(JOB))
    return builder.inttoptr(builder.add(shared, builder.mul(word, ir.IntType(64)(8))), kind.as_pointer())


@intrinsic
def yield_core(typingctx):  # type: ignore[no-untyped-def]
    """Let another thread run on this core."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        function = builder.module.globals.get("sched_yield") or ir.Function(builder.module, kind, "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


inlined: Any = njit(nogil=True, error_model="numpy", inline="always")
"""Decorate a function that is inlined into its caller before anything is optimized, and runs without the GIL.

All kernels are one compiled function, because numba optimizes a callee again in each caller. That takes long, and LLVM
22 has been seen to lose an iteration when it unrolled a loop that it had unrolled before.
"""


@inlined
def take_chunk(shared):  # type: ignore[no-untyped-def]
    """Take a chunk of the current job, and return its number, or -1 if none is left."""
    taken = False
    left = 1
    while left > 0 and not taken:
        ticket = atomic_load(shared + 8 * TICKET)
        left = ticket & 0xFFFFFFFF
        if left > 0:
            taken = compare_and_swap(shared + 8 * TICKET, ticket, ticket - 1)
    # The ticket counts one chunk less than there are: the thread that publishes the job keeps the first.
    return argument(shared, CHUNKS) - left if taken else -1


@inlined
def publish(shared, operation, chunks):  # type: ignore[no-untyped-def]
    """Publish the job in shared memory: any thread may take its chunks, except chunk 0, which the caller must run."""
    set_argument(shared, 0, operation)
    set_argument(shared, CHUNKS, chunks)
    atomic_store(shared + 8 * FINISHED, 0)
    # A new generation makes the compare-and-swap of a thread fail that read the ticket of the job before.
    generation = atomic_load(shared + 8 * TICKET) >> 32
    atomic_store(shared + 8 * TICKET, (((generation + 1) & 0x7FFFFFFF) << 32) | (chunks - 1))


@inlined
def await_chunks(shared):  # type: ignore[no-untyped-def]
    """Wait until every chunk of the job is finished, including those that other threads have taken."""
    chunks, spins = argument(shared, CHUNKS), 0
    while atomic_load(shared + 8 * FINISHED) != chunks:
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            yield_core()


@inlined
def await_chunk(shared):  # type: ignore[no-untyped-def]
    """Wait until this helper thread can take a chunk, and return the chunk's number.

    Returns -1 if there is none for a while, or if the pool stops.
    """
    chunk, spins = -1, 0
    while chunk < 0 and spins < _SPINS_BEFORE_SLEEP and atomic_load(shared + 8 * STOP) == 0:
        chunk = take_chunk(shared)
        spins += 1
    return chunk


class Pool:
    """The helper threads, and the memory that they share with the thread that submits jobs.

    A helper calls `help_out(shared, scratch)`, which works on jobs, and returns if STOP is set or if there has been no
    job for a while. The threads end when `close` is called or the pool is collected.
    """

    def __init__(self, threads: int, help_out: Callable[[int, int], None]) -> None:
        self._memory = _aligned_words(SHARED_WORDS)
        self._scratch = [_aligned_words(CHUNK_SCRATCH_BYTES // 8) for _ in range(threads)]
        self.shared = int(self._memory.ctypes.data)
        self.scratch = int(self._scratch[0].ctypes.data)
        self._alarms = [threading.Event() for _ in range(1, threads)]
        helpers = [
            threading.Thread(
                target=_help, args=(self._memory, scratch, alarm, help_out), name="tandem-kernels", daemon=True
            )
            for scratch, alarm in zip(self._scratch[1:], self._alarms, strict=True)
        ]
        self._finalizer = weakref.finalize(self, _stop, self._memory, self._alarms, helpers)
        for helper in helpers:
            helper.start()

    def write(self, layout: struct.Struct, *arguments: float) -> None:
        """Write a job's arguments, of which the first is the operation, and wake the helper threads that sleep.

        No thread works on the job before `publish` is called.
        """
        layout.pack_into(self._memory, 8 * JOB, *arguments)
        if self._memory[SLEEPING]:
            self._memory[SLEEPING] = 0
            for alarm in self._alarms:
                alarm.set()

    def close(self) -> None:
        """End the helper threads and wait for them. Idempotent."""
        self._finalizer()


def usable_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _help(memory: Any, scratch: Any, alarm: threading.Event, help_out: Callable[[int, int], None]) -> None:
    shared, private = int(memory.ctypes.data), int(scratch.ctypes.data)
    while not memory[STOP]:
        help_out(shared, private)
        alarm.clear()
        memory[SLEEPING] = 1
        if not memory[STOP]:
            alarm.wait()


def _stop(memory: Any, alarms: list[threading.Event], helpers: list[threading.Thread]) -> None:
    memory[STOP] = 1
    for alarm in alarms:
        alarm.set()
    for helper in helpers:
        if helper is not threading.current_thread():
            helper.join(timeout=1)


def _aligned_words(words: int) -> Any:
    """Return zeroed int64 memory that starts at a page boundary."""
    memory = np.zeros(words + 512, dtype=np.int64)
    skip = (-memory.ctypes.data % 4096) // 8
    return memory[skip : skip + words]
