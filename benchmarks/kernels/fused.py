"""Measures the gain of fused kernels: `python -m benchmarks.kernels fused --shape llama-3-8b`.

Every fused operation of the engine is compared with the same work in parts: PyTorch's operations one by one, or cuBLAS
with the engine's kernels around it. Both run in CUDA graphs whose launches use more memory than L2 holds, with two
exceptions: the sampler that waits for the host is timed by events, and the gate/up product of long prompts alternates
with its parts on a heated chip. For other products the engine chooses the kernel by size; where it chooses cuBLAS, the
ratio is 1. Activations are random bfloat16.
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.command_line import Measured
from benchmarks.gpu_timing import copy_bandwidth
from benchmarks.kernels.fused_contests import Comparison, Contests
from benchmarks.results import run_facts
from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.linear.triton_linear import reserve_scratch
from tandem.engine.models.shapes import shape_config, shape_names

TOKENS = (1, 8, 32, 128, 2048)
_COMPILERS = 16


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--shape", default="llama-3-8b", choices=shape_names())
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))


def measure(options: argparse.Namespace) -> Measured:
    """Measure all operations and print a table."""
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, {options.shape}, bfloat16: copy {copy / 1e9:.0f} GB/s", flush=True)
    print(f"{'operation':22} {'tokens':>6} {'fused us':>9} {'unfused us':>10} {'ratio':>6} {'of copy':>8}")
    results = compare_fused(shape_config(options.shape), options.tokens)
    for comparison in results:
        share = comparison.share(copy)
        print(
            f"{comparison.name:22} {comparison.tokens:6} {comparison.fused * 1e6:9.2f}"
            f" {comparison.unfused * 1e6:10.2f} {comparison.ratio:6.2f}"
            + (f" {share:8.1%}" if share is not None else "")
        )
    comparisons = [_for_json(comparison, copy) for comparison in results]
    result = {"copy_gb_per_s": round(copy / 1e9, 1), "comparisons": comparisons, "shape": options.shape}
    return f"fused-kernels-{options.shape}", result | {"dtype": "bfloat16", **run_facts("cuda")}


def compare_fused(engine_shape: ModelSpec, tokens: Sequence[int]) -> list[Comparison]:
    """Measure all contests for steps of these numbers of tokens, and return them sorted by name."""
    device = torch.device("cuda", torch.cuda.current_device())
    reserve_scratch(device)
    contests = Contests(engine_shape, device, max(tokens))
    entered = [contest for count in tokens for contest in contests.of(count)]
    # Kernels compile at their first launch, which takes a second each, so they are launched in parallel.
    with ThreadPoolExecutor(_COMPILERS) as pool:
        list(pool.map(lambda contest: contest.fused(contest.inputs[0]), entered))
    torch.cuda.synchronize()
    return sorted((contest.measure() for contest in entered), key=lambda comparison: comparison.name)


def _for_json(comparison: Comparison, copy: float) -> dict[str, object]:
    share = comparison.share(copy)
    return {
        "operation": comparison.name,
        "tokens": comparison.tokens,
        "fused_us": round(comparison.fused * 1e6, 3),
        "unfused_us": round(comparison.unfused * 1e6, 3),
        "ratio": round(comparison.ratio, 3),
        "copy_share": None if share is None else round(share, 4),
    }
