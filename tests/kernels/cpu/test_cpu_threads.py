"""The pool: every chunk is computed once, threads end, and no job waits for a sleeping thread.

Processors of x86 order memory more strictly than Arm's, so for these the instructions are tested.
"""

import gc
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llvmlite import binding, ir
from numba import types
from torch import Tensor

from tandem.engine.kernels.cpu import pool
from tandem.engine.kernels.cpu.kernels import CpuKernels
from tandem.engine.kernels.cpu.pool import SLEEPING
from tandem.engine.kernels.layers import Linear

NAME = "tandem-kernels"


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def until_ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(timeout=60)
    return not any(thread.is_alive() for thread in threads)


def add_ones(kernels: CpuKernels, hidden: Tensor) -> None:
    kernels.linear_add(torch.ones(len(hidden), 16), Linear(torch.ones(hidden.shape[1], 16) / 16), hidden)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_chunk_of_every_job_is_done_once(threads: int) -> None:
    kernels = CpuKernels(torch.float32, threads)
    hidden = torch.zeros(3, 1000)
    for _ in range(500):
        add_ones(kernels, hidden)
    assert torch.equal(hidden, torch.full_like(hidden, 500.0))
    kernels.close()


def test_helpers_that_fell_asleep_are_not_waited_for() -> None:
    kernels = CpuKernels(torch.float32, threads=3)
    hidden = torch.zeros(2, 1000)
    for _ in range(5):
        deadline = time.monotonic() + 60
        while not kernels._pool._memory[SLEEPING] and time.monotonic() < deadline:
            time.sleep(0.001)
        add_ones(kernels, hidden)
    assert torch.equal(hidden, torch.full_like(hidden, 5.0))
    kernels.close()


def test_closing_ends_the_threads_and_work_goes_on_alone() -> None:
    before = set(helpers())
    kernels = CpuKernels(torch.float32, threads=3)
    mine = [thread for thread in helpers() if thread not in before]
    assert len(mine) == 2
    kernels.close()
    kernels.close()
    assert until_ended(mine)
    hidden = torch.zeros(2, 100)
    add_ones(kernels, hidden)
    assert torch.equal(hidden, torch.ones_like(hidden))


def test_forgotten_kernels_end_their_threads() -> None:
    before = set(helpers())
    kernels = CpuKernels(torch.float32, threads=2)
    mine = [thread for thread in helpers() if thread not in before]
    del kernels
    gc.collect()
    assert until_ended(mine)


def test_two_engines_in_one_process_do_not_disturb_each_other() -> None:
    results = [torch.zeros(2, 1000), torch.zeros(2, 1000)]

    def work(hidden: Tensor) -> None:
        kernels = CpuKernels(torch.float32, threads=2)
        for _ in range(200):
            add_ones(kernels, hidden)
        kernels.close()

    threads = [threading.Thread(target=work, args=(hidden,)) for hidden in results]
    for thread in threads:
        thread.start()
    assert until_ended(threads)
    assert all(torch.equal(hidden, torch.full_like(hidden, 200.0)) for hidden in results)


@pytest.mark.parametrize(
    ("access", "arguments", "instructions"),
    [
        (pool.atomic_load, 1, {"ldar"}),
        (pool.atomic_store, 2, {"stlr"}),
        (pool.atomic_add, 2, {"ldaxr", "stlxr"}),
        (pool.compare_and_swap, 3, {"ldaxr", "stlxr"}),
    ],
)
def test_words_of_all_threads_are_ordered_on_arm(access: Any, arguments: int, instructions: set[str]) -> None:
    """Loads acquire and stores release, so a thread that takes a chunk sees the job's arguments."""
    signature, codegen = access._defn(None, *[types.int64] * arguments)
    function = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * arguments), "access")
    builder = ir.IRBuilder(function.append_basic_block())
    codegen(SimpleNamespace(get_dummy_value=lambda: None), builder, signature, function.args)
    builder.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine()
    assembly = machine.emit_assembly(binding.parse_assembly(str(function.module))).split()
    assert instructions <= set(assembly)
    assert not {"ldr", "str", "ldxr", "stxr"} & set(assembly)
