"""The single compiled function of the CPU kernels: it runs a job, or helps another thread with its job."""

from typing import Any

import numpy as np

from tandem.engine.kernels.cpu import attention as cpu_attention
from tandem.engine.kernels.cpu import products as cpu_products
from tandem.engine.kernels.cpu import rope as cpu_rope
from tandem.engine.kernels.cpu.compiled_cache import cached_entry
from tandem.engine.kernels.cpu.pool import (
    FINISHED,
    argument,
    atomic_add,
    await_chunk,
    await_chunks,
    inlined,
    publish,
    take_chunk,
)

HELP, NORM, LINEAR, NORM_LINEAR, GATE_UP, NORM_GATE_UP, ROPE, ATTENTION = range(8)
"""The operations of `perform`: HELP helps with the jobs of other threads, the others are kinds of jobs.

A product whose input has to be normed, or quantized for a packed weight, consists of two jobs: NORM, then the product.
"""

TAGS: dict[str, Any] = {"float32": np.float32(0), "bfloat16": np.uint16(0)}
"""For each dtype, a value whose type is the `tag` of the elements in memory."""


@cached_entry
def perform(shared, scratch, operation, tag):  # type: ignore[no-untyped-def]
    """Run the job `operation`, whose arguments are in shared memory, or, with HELP, chunks of other threads' jobs.

    Returns when the job is complete; with HELP, when no chunk has come for a while or the pool stops.
    """
    job = _first_job(shared, operation)
    chunk = await_chunk(shared) if operation == HELP else _begin(shared, job)
    while chunk >= 0:
        _work(shared, chunk, scratch, tag)
        atomic_add(shared + 8 * FINISHED, 1)
        if operation == HELP:
            chunk = await_chunk(shared)
        else:
            chunk = take_chunk(shared)
            if chunk < 0:
                await_chunks(shared)
                if job != operation:
                    job = operation
                    chunk = _begin(shared, job)
    if operation == ATTENTION:
        cpu_attention.merge_partials(shared, tag)


@inlined
def _first_job(shared, operation):  # type: ignore[no-untyped-def]
    packed = operation in {LINEAR, GATE_UP} and argument(shared, cpu_products.CODE_BITS) != 0
    return NORM if packed or operation in {NORM_LINEAR, NORM_GATE_UP} else operation


@inlined
def _begin(shared, job):  # type: ignore[no-untyped-def]
    """Publish a job, and return the number of the first chunk, which the caller runs."""
    if job == ATTENTION:
        chunks = cpu_attention.list_items(shared)
    elif job == ROPE:
        chunks = _pieces(argument(shared, cpu_rope.TOKENS), cpu_products.TOKENS_A_CHUNK)
    elif job == NORM:
        chunks = _pieces(argument(shared, cpu_products.TOKENS), cpu_products.TOKENS_A_CHUNK)
    else:
        chunks = _pieces(argument(shared, cpu_products.ROWS), argument(shared, cpu_products.ROWS_A_CHUNK))
    publish(shared, job, chunks)
    return 0


@inlined
def _pieces(n, size):  # type: ignore[no-untyped-def]
    return (n + size - 1) // size


@inlined
def _work(shared, chunk, scratch, tag):  # type: ignore[no-untyped-def]
    job = argument(shared, 0)
    if job == ATTENTION:
        cpu_attention.attention_chunk(shared, chunk, scratch, tag)
    elif job == ROPE:
        cpu_rope.rope_chunk(shared, chunk, scratch, tag)
    elif job == NORM:
        cpu_products.norm_chunk(shared, chunk, scratch, tag)
    elif job in {GATE_UP, NORM_GATE_UP}:
        cpu_products.gate_up_chunk(shared, chunk, scratch, tag)
    else:
        cpu_products.linear_chunk(shared, chunk, scratch, tag)
