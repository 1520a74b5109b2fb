"""Measures a model divided among GPUs of one host, beside the same model on one GPU.

    python -m benchmarks.engine ranks --shape llama-3-8b --tensor-parallel-size 2 [--alone] [--save]
    python -m benchmarks.engine ranks --shape llama-3.1-8b --pipeline 2 [--alone] [--save]
    python -m benchmarks.engine ranks --shape llama-3.1-8b --context-parallel 2 [--alone] [--save]

Weights are random, shapes are real. The sum over all ranks is timed by size, in one shot, in two (with three ranks or
more) and with NCCL; with RMSNorm in the same kernel, and with a kernel for it after the sum. Then the steps are timed.
A share of the copy bandwidth is that of one GPU: the bytes that one rank reads, over the time of the step.
`--alone` measures the steps on one GPU too, before those of the group.

`--pipeline` measures pipeline stages of one GPU each instead: prompts of 32,768 tokens that follow each other without a
pause, in chunks, as a prefill worker computes them.

`--context-parallel` measures ranks that have the whole model and divide the tokens of prompts instead: prompts in one
step, and prompts of 32,768 tokens in chunks.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.command_line import Measured, at_least, need_gpu
from benchmarks.results import run_facts, scheme_suffix
from tandem.engine.config import EngineConfig
from tandem.engine.config.sharding import Rank
from tandem.engine.kernels.layers import Norm
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.shapes import shape_names, write_shape
from tandem.engine.weights.gguf import default_cache

if TYPE_CHECKING:
    from benchmarks.engine.gpu_engine import GpuEngine
    from tandem.engine.parallel.cuda_collectives import CudaCollectives

BATCHES = (1, 8, 32, 128)
CONTEXT = 1024
PREFILLS = (2048, 8192)
"""Prompts in one step, whose tokens are also the chunks of a long prompt of ranks that divide tokens."""
LONG_PROMPT, CHUNKS = 32_768, (1024, 2048, 4096)
"""The tokens of a prompt and of a chunk, for pipeline stages.

At the end of a prompt, the first stage waits: it has a first chunk of the next prompt, which takes less time than the
last chunk of this one. The smaller the chunks, the shorter is this wait.
"""
_LONG_PROMPTS = 4
SIZES = tuple(1 << power for power in range(13, 24))
"""Sizes in bytes of the tensors that are summed: from one row of 4,096 elements to prefill steps."""
_HIDDEN = 4096
"""Elements of a row of the tensors that are summed."""
_REPEATS = 32
_JOIN_S = 120.0

Figures = dict[str, object]
Measurement = Callable[[ModelRunner, str], Figures]
"""Measures an engine, which its second argument names in the output."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--shape", choices=shape_names(), default="llama-3-8b")
    parser.add_argument("--tensor-parallel-size", type=at_least(2), default=2, metavar="RANKS")
    parser.add_argument("--quantization", choices=["int8", "fp8", "int4"])
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--pipeline", type=at_least(2), metavar="STAGES", help="measure pipeline stages instead")
    instead.add_argument(
        "--context-parallel", type=at_least(2), metavar="RANKS", help="measure ranks that divide tokens instead"
    )
    parser.add_argument("--alone", action="store_true", help="measure one GPU too")


def measure(options: argparse.Namespace) -> Measured:
    """Measure the sums and the group, or pipeline stages, or ranks that divide tokens, and one GPU if asked."""
    need_gpu()
    ranks, stages, context_ranks = options.tensor_parallel_size, options.pipeline, options.context_parallel
    config = EngineConfig.of(
        write_shape(options.shape, default_cache() / f"shape-{options.shape}"),
        device="cuda",
        dtype="bfloat16",
        random_weights=True,
        max_step_tokens=max(CHUNKS) if stages else max(PREFILLS),
        max_batch_requests=max(BATCHES),
        quantization=options.quantization,
    )
    measured = _long_prompts if stages else _prompts if context_ranks else _steps
    alone = _alone(config, measured) if options.alone else Figures()
    if stages:
        name, result = "stages", _group(config, 1, measured, stages=stages) | {"stages": stages}
    elif context_ranks:
        result = _group(config, context_ranks, measured, divides_tokens=True) | {"context_ranks": context_ranks}
        name = "context-ranks"
    else:
        name, result = "ranks", _sums(ranks) | _group(config, ranks, measured) | {"ranks": ranks}
    result |= _over_alone(result, alone)
    scheme = scheme_suffix(options.quantization, "auto")
    result |= {"shape": options.shape + scheme, "dtype": "bfloat16", **run_facts("cuda")}
    return f"{name}-{options.shape}{scheme}", result


def _group(
    config: EngineConfig, ranks: int, measured: Measurement, *, stages: int = 1, divides_tokens: bool = False
) -> Figures:
    from tandem.worker.rank_group import RankGroup

    group = RankGroup(config, ranks, stages=stages, divides_tokens=divides_tokens)
    try:
        return measured(group.load(), f"{ranks} ranks" if stages == 1 else f"{stages} stages")
    finally:
        group.close()


def _alone(config: EngineConfig, measured: Measurement) -> Figures:
    figures = measured(ModelRunner.load(config), "one GPU")
    gc.collect()
    torch.cuda.empty_cache()
    return figures


def _steps(runner: ModelRunner, what: str) -> Figures:
    """Measure decode steps and prefills; the engine must not compute anything else."""
    from benchmarks.engine.gpu_engine import DECODE_STEPS, GpuEngine
    from benchmarks.gpu_timing import copy_bandwidth

    engine, copy, figures = GpuEngine(runner), copy_bandwidth(), Figures()
    for batch in BATCHES:
        if engine.holds(batch, CONTEXT + DECODE_STEPS // 2):
            seconds = engine.decode_seconds(batch, CONTEXT)
            share = engine.decode_bytes([CONTEXT] * batch) / seconds / copy
            figures |= {f"decode_ms_b{batch}": round(seconds * 1e3, 4), f"decode_bw_ratio_b{batch}": round(share, 4)}
            print(f"{what}: decode b{batch:<4} {seconds * 1e3:8.3f} ms  {share:6.1%} of copy", flush=True)
    return figures | _prefills(engine, what)


def _prefills(engine: GpuEngine, what: str) -> Figures:
    figures = Figures()
    for tokens in PREFILLS:
        seconds = engine.prefill_seconds(1, tokens, rounds=5)
        figures[f"prefill_ms_1x{tokens}"] = round(seconds * 1e3, 3)
        print(f"{what}: prefill {tokens} {seconds * 1e3:8.2f} ms", flush=True)
    return figures


def _prompts(runner: ModelRunner, what: str) -> Figures:
    """Measure prompts in one step, and long prompts in chunks of as many tokens."""
    from benchmarks.engine.gpu_engine import GpuEngine

    return _prefills(GpuEngine(runner), what) | _long_prompts(runner, what, PREFILLS)


def _long_prompts(runner: ModelRunner, what: str, chunks: Sequence[int] = CHUNKS) -> Figures:
    """Measure prompts that follow each other, of `LONG_PROMPT` tokens or as long as the model's context."""
    from benchmarks.engine.gpu_engine import GpuEngine

    engine, tokens, figures = GpuEngine(runner), min(LONG_PROMPT, runner.facts.max_context), Figures()
    for chunk in chunks:
        seconds = engine.back_to_back_seconds(tokens, chunk, _LONG_PROMPTS)
        figures[f"prompts_ms_{tokens}_by_{chunk}"] = round(seconds * 1e3, 2)
        print(f"{what}: {tokens / seconds:,.0f} tokens/s, prompts of {tokens} in chunks of {chunk}", flush=True)
    return figures


def _over_alone(group: Figures, alone: Figures) -> Figures:
    figures: Figures = {f"alone_{name}": figure for name, figure in alone.items()}
    for name, figure in alone.items():
        kind, unit, size = name.partition("_ms_")
        faster = group.get(name)
        if unit and isinstance(figure, float) and isinstance(faster, float):
            figures[f"{kind}_speedup_{size}"] = round(figure / faster, 3)
            print(f"{kind} {size}: {figure / faster:.2f} times as fast as one GPU", flush=True)
    return figures


def _sums(ranks: int) -> Figures:
    """Return the device time of a sum by size and by method; raises if a rank's bits differ."""
    context = multiprocessing.get_context("spawn")
    results: SimpleQueue[tuple[int, Figures]] = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_measure_sums, args=(Rank(number, ranks), Path(folder) / "meeting", results))
            for number in range(ranks)
        ]
        for process in processes:
            process.start()
        by_rank = dict(results.get() for _ in processes)
        for process in processes:
            process.join()
    sums = [figures.pop("sums") for figures in by_rank.values()]
    if any(rank_sums != sums[0] for rank_sums in sums):
        raise AssertionError("the ranks have different sums")
    return by_rank[0]


def _measure_sums(rank: Rank, meeting: Path, results: SimpleQueue[tuple[int, Figures]]) -> None:
    from tandem.engine.parallel.cuda_collectives import CudaCollectives

    device = torch.device("cuda", rank.number)
    collectives = CudaCollectives(rank, meeting, _JOIN_S, device, most_bytes=max(SIZES))
    shots = {"one_shot": 1, "two_shot": 2, "nccl": 0}
    if rank.count == 2:
        del shots["two_shot"]  # which sends no less
    figures: Figures = {}
    sums = []
    for size in SIZES:
        times = {}
        for kind, number in shots.items():
            collectives.shots_for = lambda *_, number=number: number
            for norm in ("", "_with_norm", "_then_norm"):
                if number or norm != "_with_norm":  # NCCL computes no norm
                    times[kind + norm], words = _measure_sum(collectives, size, norm)
                    sums.append(words)
        figures |= {f"sum_{name}_us_{size >> 10}k": us for name, us in times.items()}
        if rank.leads:
            print(
                f"sum of {size >> 10} KiB, us: " + ", ".join(f"{name} {us}" for name, us in times.items()), flush=True
            )
    results.put((rank.number, figures | {"sums": sums}))
    collectives.close()


def _measure_sum(collectives: CudaCollectives, size: int, norm: str) -> tuple[float, int]:
    """Return the device time of a sum in us, and the sum of the words of its result.

    The sum's kernel also computes the norm of each row if `norm` is "_with_norm", another kernel if "_then_norm".
    """
    from benchmarks.gpu_timing import graph_seconds
    from tandem.engine.kernels.rowwise.triton_norm import rms_norm
    from tandem.engine.kernels.triton_launch import overlaps_launches

    device, pdl = torch.device("cuda", collectives.rank.number), overlaps_launches()
    part = torch.zeros(size // (2 * _HIDDEN), _HIDDEN, dtype=torch.bfloat16, device=device)
    total, weight = torch.zeros_like(part), Norm(torch.ones(_HIDDEN, dtype=torch.bfloat16, device=device), 1e-5)

    def add(_: int) -> torch.Tensor:
        normed = collectives.all_reduce_add(part, total, weight if norm == "_with_norm" else None)
        if norm == "_then_norm":
            normed = rms_norm(total, weight, pdl=pdl)
        return total if normed is None else normed

    seconds = graph_seconds(add, _REPEATS)
    part.normal_(generator=torch.Generator(device).manual_seed(collectives.rank.number))
    total.zero_()
    return round(seconds * 1e6, 2), int(add(0).view(torch.int16).long().sum().item())
