"""Measures mixtures of experts alone on this GPU: `python -m benchmarks.experts --device cuda [--save]`.

    python -m benchmarks.experts --device cuda --tune [--shapes qwen3-30b-a3b]

One layer's routed experts (norm, router, choice, products, sum; not the shared expert) in bfloat16 with random weights,
in CUDA graphs whose launches have different tokens, so that weights come from memory and not from L2. The bytes are
those of the experts that the tokens hit, which are counted, and of the router; "of copy" is their rate / that of a
large device copy of this run, whose reads and writes both count. Random routers must hit E·(1 − (1 − k/E)^b) experts:
both numbers are printed. With `--tune` it prints lines for `TUNED` of tandem/engine/kernels/experts/expert_tiles.py
instead. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch

from benchmarks.command_line import need_gpu
from benchmarks.gpu.ceilings import copy_bandwidth
from benchmarks.results import run_facts, save_result
from tandem.engine.models.shapes import shape_names

SHAPES = ("qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b")
TOKENS = (1, 8, 32, 128, 256, 2048)


def main() -> None:
    """Measures, prints a table or lines for `TUNED`, and JSON last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda"])
    parser.add_argument("--shapes", nargs="+", choices=shape_names(), help="default: three, with --tune the first")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--tune", action="store_true", help="measure tiles instead")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    arguments = parser.parse_args()
    need_gpu()
    copy = copy_bandwidth()
    facts = {"copy_gb_per_s": round(copy / 1e9, 1), "dtype": "bfloat16", **run_facts("cuda")}
    print(f"{torch.cuda.get_device_name()}, bfloat16: copy {copy / 1e9:.0f} GB/s", flush=True)
    if arguments.tune:
        result = {"tiles": _tune(arguments.shapes or SHAPES[:1], copy), **facts}
    else:
        result = {"experts": _measure(arguments.shapes or SHAPES, arguments.tokens, copy), **facts}
    if arguments.save:
        print("saved", save_result("tune-experts" if arguments.tune else "experts", result))
    print(json.dumps(result))


def _measure(shapes: Sequence[str], tokens: Sequence[int], copy: float) -> list[dict[str, object]]:
    """Returns a row for each shape and number of tokens, and prints it."""
    # Triton is not installed where there is no GPU.
    from benchmarks.gpu.experts_timing import ExpertLayer, compile_steps

    layers = {shape: ExpertLayer(shape) for shape in shapes}
    compile_steps((layer, count, None) for layer in layers.values() for count in tokens)
    print(f"{'shape':18} {'tokens':>6} {'hit':>6} {'formula':>7} {'us':>9} {'GB/s':>6} {'of copy':>8} {'TFLOP/s':>8}")
    rows: list[dict[str, object]] = []
    for shape, layer in layers.items():
        for count in tokens:
            step = layer.measure(count)
            share = step.bytes / step.seconds / copy
            print(
                f"{shape:18} {count:6} {step.hit:6.1f} {step.expected_hit:7.1f} {step.seconds * 1e6:9.1f}"
                f" {step.bytes / step.seconds / 1e9:6.0f} {share:8.1%} {step.flops / step.seconds / 1e12:8.1f}",
                flush=True,
            )
            rows.append(
                {
                    "shape": shape,
                    "tokens": count,
                    "experts_hit": round(step.hit, 2),
                    "experts_hit_by_formula": round(step.expected_hit, 2),
                    "us": round(step.seconds * 1e6, 2),
                    "copy_share": round(share, 4),
                    "tflops": round(step.flops / step.seconds / 1e12, 1),
                }
            )
    return rows


def _tune(shapes: Sequence[str], copy: float) -> list[dict[str, object]]:
    """Returns the best tiles of each shape, and prints them."""
    from benchmarks.gpu.experts_timing import ExpertLayer
    from benchmarks.tuning.tune_experts import tuned

    rows: list[dict[str, object]] = []
    print("TUNED = {")
    for shape in shapes:
        layer = ExpertLayer(shape)
        print(f"    {layer.shape}: {{  # {shape}")
        for found in tuned(layer):
            share, before = (step.bytes / step.seconds / copy for step in (found.best, found.default))
            comment = f"{found.tokens} tokens: {share:.1%} of copy, before {before:.1%}"
            print(f"        {found.tile.tokens}: {found.tile},  # {comment}", flush=True)
            rows.append(
                {
                    "shape": shape,
                    "tokens": found.tokens,
                    "tile": str(found.tile),
                    "copy_share": round(share, 4),
                    "copy_share_before": round(before, 4),
                }
            )
        print("    },")
    print("}")
    return rows


if __name__ == "__main__":
    main()
