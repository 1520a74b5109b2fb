"""Measures the gain of fused kernels on this GPU: `python -m benchmarks.fused_kernels --shape llama-3-8b [--save]`.

Every fused operation of the engine is compared with the same work in parts: PyTorch's operations one by one, or cuBLAS
with the engine's kernels around it. Both run in CUDA graphs whose launches use more memory than L2 holds. Two
exceptions: the sampler that waits for the host is timed by events, and the gate/up product of long prompts takes turns
with its parts on a heated chip. For other products the engine chooses the kernel by size; where it chooses cuBLAS the
ratio is 1. Activations are random bfloat16. The last line is one JSON object.
"""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.command_line import need_gpu
from benchmarks.gpu.ceilings import measure_ceilings
from benchmarks.gpu.contest import Comparison
from benchmarks.results import run_facts, save_result
from tandem.engine.config.model import ModelSpec
from tandem.engine.models.load_spec import load_spec
from tandem.engine.models.shapes import shape_names, write_shape
from tandem.engine.weights.gguf import default_cache

TOKENS = (1, 8, 32, 128, 2048)
_COMPILERS = 16


def main() -> None:
    """Measures all operations, prints a table, and JSON last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3-8b", choices=shape_names())
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    arguments = parser.parse_args()
    need_gpu()
    folder = write_shape(arguments.shape, default_cache() / f"shape-{arguments.shape}")
    copy = measure_ceilings().copy
    print(f"{torch.cuda.get_device_name()}, {arguments.shape}, bfloat16: copy {copy / 1e9:.0f} GB/s", flush=True)
    print(f"{'operation':22} {'tokens':>6} {'fused us':>9} {'unfused us':>10} {'ratio':>6} {'of copy':>8}")
    found = compare_fused(load_spec(folder), arguments.tokens)
    for each in found:
        share = each.share(copy)
        print(
            f"{each.name:22} {each.tokens:6} {each.fused * 1e6:9.2f} {each.unfused * 1e6:10.2f} {each.ratio:6.2f}"
            + (f" {share:8.1%}" if share is not None else "")
        )
    result = {
        "copy_gb_per_s": round(copy / 1e9, 1),
        "comparisons": [_for_json(each, copy) for each in found],
        "shape": arguments.shape,
        "dtype": "bfloat16",
        **run_facts("cuda"),
    }
    if arguments.save:
        print("saved", save_result(f"fused-kernels-{arguments.shape}", result))
    print(json.dumps(result))


def compare_fused(engine_shape: ModelSpec, tokens: Sequence[int]) -> list[Comparison]:
    """Measures all contests for steps of these numbers of tokens; returns them sorted by name."""
    # Triton is not installed where there is no GPU.
    from benchmarks.gpu.fused_contests import Contests
    from tandem.engine.kernels.linear.triton_linear import reserve_scratch

    device = torch.device("cuda", torch.cuda.current_device())
    reserve_scratch(device)
    contests = Contests(engine_shape, device, max(tokens))
    entered = [contest for count in tokens for contest in contests.of(count)]
    # Kernels compile at their first launch, a second each, so they are launched in parallel.
    with ThreadPoolExecutor(_COMPILERS) as pool:
        list(pool.map(lambda contest: contest.fused(contest.inputs[0]), entered))
    torch.cuda.synchronize()
    return sorted((contest.measure() for contest in entered), key=lambda found: found.name)


def _for_json(found: Comparison, copy: float) -> dict[str, object]:
    share = found.share(copy)
    return {
        "operation": found.name,
        "tokens": found.tokens,
        "fused_us": round(found.fused * 1e6, 3),
        "unfused_us": round(found.unfused * 1e6, 3),
        "ratio": round(found.ratio, 3),
        "copy_share": None if share is None else round(share, 4),
    }


if __name__ == "__main__":
    main()
