"""Tunes decode attention on this GPU: `python -m benchmarks.tuning.tune_attention [--quick] [--save]`.

`--kv-cache-dtype int8` tunes it over 8-bit keys and values.

Every plan of a short list runs at every size in a CUDA graph whose calls read more cache than L2 holds: rows of equal
length, of lognormal lengths as in conversations, and one long row among short ones. Figures are KV bytes over time as
shares of the copy bandwidth measured in the same run. The last line is one JSON object.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

import torch

from benchmarks.command_line import need_gpu
from benchmarks.gpu.attention_timing import DTYPE, Size, in_parallel, make_inputs, own_plan, plans, rank, uneven
from benchmarks.gpu.ceilings import copy_bandwidth
from benchmarks.results import run_facts, save_result
from tandem.engine.kernels.attention.triton_attention_plan import Plan
from tandem.engine.models.shapes import shape_config, shape_names

KV_DTYPES = {"bfloat16": DTYPE, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
MODELS = ("llama-3-8b", "qwen3-0.6b", "llama-3.2-1b")
EQUAL = ((1, 1024), (1, 32768), (8, 1024), (12, 2048), (32, 1024), (64, 2048), (128, 1024), (128, 4096), (256, 1024))
"""Number of rows, and the context of each."""
UNEVEN = ((4, 2048), (12, 2048), (24, 2048), (33, 2048), (44, 2048), (128, 2048), (256, 1024))
"""Number of rows, and their mean context."""
LONG = ((12, 32768, 1024), (128, 32768, 1024))
"""Number of rows, the context of one, and of each other."""


def main() -> None:
    """Measures all sizes, and prints JSON last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=shape_names(), default=list(MODELS), help="whose heads")
    parser.add_argument("--rows", nargs="+", type=int, default=[], help="sizes of so many rows alone")
    parser.add_argument("--sizes", nargs="+", default=[], help="sizes of these names alone, e.g. 64x2048")
    parser.add_argument("--kv-cache-dtype", choices=KV_DTYPES, default="bfloat16", help="(bfloat16)")
    parser.add_argument("--quick", action="store_true", help="only what the engine's own plan gives")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    arguments = parser.parse_args()
    need_gpu()
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e9:.0f} GB/s")
    sizes = [
        size
        for size in sizes_of(arguments.models, KV_DTYPES[arguments.kv_cache_dtype])
        if (not arguments.rows or len(size.lengths) in arguments.rows)
        and (not arguments.sizes or size.name.split(" h")[0] in arguments.sizes)
    ]
    found = tune(sizes, copy, arguments.quick)
    result = {
        "copy_gb_per_s": copy / 1e9,
        "attention": found,
        "models": arguments.models,
        "dtype": arguments.kv_cache_dtype,
    }
    result |= run_facts("cuda")
    if arguments.save:
        print("saved", save_result("tune-attention", result))
    print(json.dumps(result))


def sizes_of(models: Sequence[str], kv_dtype: torch.dtype = DTYPE) -> list[Size]:
    """Returns every workload with the heads of each model; models with equal heads count once."""
    shapes = dict.fromkeys(shape for name in models for shape in shape_config(name).attention_shapes)
    lengths = {f"{rows}x{context}": (context,) * rows for rows, context in EQUAL}
    lengths |= {f"{rows}x{mean} uneven": uneven(rows, mean) for rows, mean in UNEVEN}
    lengths |= {f"{rows}x{rest} and {long}": (*(rest,) * (rows - 1), long) for rows, long, rest in LONG}
    return [
        Size(f"{name} h{shape.heads}/{shape.kv_heads} d{shape.head_dim}", each, shape, kv_dtype)
        for shape in shapes
        for name, each in lengths.items()
    ]


def tune(sizes: Sequence[Size], copy: float, quick: bool) -> dict[str, object]:
    """Measures and prints every size; returns the results for JSON. `copy`: the copy bandwidth in byte/s."""
    if not quick:
        in_parallel(sizes)
    return {size.name: _tune_one(size, copy, quick) for size in sizes}


def _tune_one(size: Size, copy: float, quick: bool) -> dict[str, object]:
    own = own_plan(size)
    ranked = rank([own] if quick else plans(size), size, make_inputs(size))
    shares = [(round(size.bytes / seconds / copy, 4), plan) for seconds, plan in ranked]
    share_of_own = next(share for share, plan in shares if plan == own)
    best = ", ".join(f"{share:.3f} {_brief(plan)}" for share, plan in shares[:4])
    print(f"{size.name:36} engine {share_of_own:.3f} {_brief(own)}; {best}", flush=True)
    return {
        "engine": asdict(own),
        "engine_share": share_of_own,
        "engine_microseconds": round(size.bytes / share_of_own / copy * 1e6, 2),
        "shares": {_brief(plan): share for share, plan in shares},
    }


def _brief(plan: Plan) -> str:
    cut = f"{plan.units} units" if plan.units else f"{plan.splits} splits"
    return f"{plan.block_tokens}/{plan.warps}/{plan.stages} {cut}"


if __name__ == "__main__":
    main()
