"""Find the plans of decode attention on this GPU: `python -m benchmarks.tune_attention [--quick] [--save]`.

Every plan of a short list runs at every size in a CUDA graph whose calls walk through more cache than L2 holds. Figures
are bytes of keys and values over time, and their share of the copy bandwidth measured in the same run. The best plans
run once more with overlapped launches, as the engine does. The last line is one JSON object.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

import torch

from benchmarks.attention_timing import DEVICE, Size, in_parallel, make_inputs, measure, plans, rank, tiles
from benchmarks.ceilings import copy_bandwidth
from benchmarks.command_line import need_gpu
from benchmarks.results import run_facts, save_result
from engine.kernels.triton_attention import DecodeAttention, Plan
from engine.models.shapes import shape_config, shape_names

MODELS = ("llama-3-8b", "qwen3-0.6b", "llama-3.2-1b")
WORKLOADS = ((64, 2048), (128, 4096), (1, 32768), (1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 1024))
"""Rows and context of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=shape_names(), default=list(MODELS), help="whose heads")
    parser.add_argument("--quick", action="store_true", help="only what the engine's own plan gives")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    arguments = parser.parse_args()
    need_gpu()
    copy = copy_bandwidth() / 1e9
    print(f"{torch.cuda.get_device_name()}: copy {copy:.0f} GB/s")
    found = tune(sizes_of(arguments.models), copy, arguments.quick)
    result = {"copy_gb_per_s": copy, "attention": found, "models": arguments.models, "dtype": "bfloat16"}
    result |= run_facts("cuda")
    if arguments.save:
        print("saved", save_result("tune-attention", result))
    print(json.dumps(result))


def sizes_of(models: Sequence[str]) -> list[Size]:
    """Every workload with the heads of each model; models of the same heads count once."""
    shapes = [shape_config(name) for name in models]
    heads = dict.fromkeys((shape.heads, shape.kv_heads, shape.head_dim) for shape in shapes)
    return [Size(rows, context, *each) for each in heads for rows, context in WORKLOADS]


def tune(sizes: Sequence[Size], copy: float, quick: bool) -> dict[str, object]:
    """Measures and prints every size → for JSON. `copy`: the copy bandwidth in GB/s."""
    if not quick:
        distinct = {size.shape: size for size in sizes}
        in_parallel([(plan, size, False, False) for size in distinct.values() for plan in tiles()])
    return {size.name: _tune_one(size, copy, quick) for size in sizes}


def _tune_one(size: Size, copy: float, quick: bool) -> dict[str, object]:
    inputs = make_inputs(size)
    own = DecodeAttention(size.shape, size.rows, DEVICE, pdl=False)
    own(inputs.q, inputs.cache, 0, inputs.table, inputs.contexts)
    chosen: Plan = next(iter(own._plans.values()))
    tried = [chosen] if quick else [chosen, *(plan for plan in plans(size) if plan != chosen)]
    ranked = rank(tried, size, inputs)
    for place, (seconds, plan) in enumerate(ranked[: 1 if quick else 3]):
        print(f"{size.name:24} {'best' if place == 0 else '':5}{_figures(size, seconds, copy)} {plan}", flush=True)
    engine_seconds = next(seconds for seconds, plan in ranked if plan == chosen)
    print(f"{size.name:24} now  {_figures(size, engine_seconds, copy)} {chosen}")
    best = ranked[0][1]
    in_parallel([(best, size, True, False), (best, size, True, True)])
    overlapped, early = (measure(best, size, inputs, pdl=True, early=early) for early in (False, True))
    print(f"{size.name:24} pdl  {_figures(size, overlapped, copy)}, read early {_figures(size, early, copy)}")
    return {
        "best": asdict(best),
        "microseconds": ranked[0][0] * 1e6,
        "overlapped_microseconds": overlapped * 1e6,
        "early_microseconds": early * 1e6,
        "engine_microseconds": engine_seconds * 1e6,
        "ratio": size.bytes / ranked[0][0] / 1e9 / copy,
        "engine_ratio": size.bytes / engine_seconds / 1e9 / copy,
    }


def _figures(size: Size, seconds: float, copy: float) -> str:
    rate = size.bytes / seconds / 1e9
    return f"{seconds * 1e6:8.2f} us {rate:6.0f} GB/s {rate / copy:5.3f}"


if __name__ == "__main__":
    main()
