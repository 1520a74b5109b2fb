"""Measures mixtures of experts alone: `python -m benchmarks.kernels experts [--forms int8 fp8 fp8_blocks int4]`.

    python -m benchmarks.kernels experts --tune [--shapes qwen3-30b-a3b] [--forms fp8_blocks_inputs]

The benchmark runs the routed experts of one layer (norm, router, top-k, products, sum; not the shared expert) in
bfloat16 with random weights, in CUDA graphs whose launches have different tokens, so that weights come from memory and
not from L2. The bytes are those of the router and of the experts that the tokens hit; these experts are counted. "of
copy" is the rate at which a step reads its bytes / the bandwidth of a large device copy in the same run, whose reads
and writes both count. A random router is expected to hit E·(1 − (1 − k/E)^b) experts; this number and the counted one
are printed. With `--tune` it prints lines for `TUNED` of tandem/engine/kernels/experts/expert_tiles.py instead, or with
`--forms` for `PACKED_TUNED`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product

import torch

from benchmarks.command_line import Measured
from benchmarks.gpu_timing import copy_bandwidth
from benchmarks.kernels.experts_timing import FORMS, ExpertLayer, PackedExpertLayer, compile_steps
from benchmarks.kernels.experts_tuning import tuned
from benchmarks.results import run_facts
from tandem.engine.kernels.experts.packed_experts import form_of
from tandem.engine.models.shapes import shape_names

SHAPES = ("qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b")
TOKENS = (1, 8, 32, 128, 256, 2048)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--shapes", nargs="+", choices=shape_names(), help="default: three, with --tune the first")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=[], help="also with weights of these codes")
    parser.add_argument("--tune", action="store_true", help="measure tiles instead")


def measure(options: argparse.Namespace) -> Measured:
    """Print a table, or lines for `TUNED`."""
    copy = copy_bandwidth()
    facts = {"copy_gb_per_s": round(copy / 1e9, 1), "dtype": "bfloat16", **run_facts("cuda")}
    print(f"{torch.cuda.get_device_name()}, bfloat16: copy {copy / 1e9:.0f} GB/s", flush=True)
    if options.tune:
        return "tune-experts", {"tiles": _tune(options.shapes or SHAPES[:1], options.forms, copy), **facts}
    rows: list[dict[str, object]] = []
    print(f"{'shape':18} {'form':10} {'tokens':>6} {'hit':>6} {'formula':>7} {'us':>9} {'of copy':>8} {'TFLOP/s':>8}")
    for shape in options.shapes or SHAPES:
        for form in (None, *options.forms):
            rows += _measure(shape, form, options.tokens, copy)
    return "experts", {"experts": rows, **facts}


def _measure(shape: str, form: str | None, tokens: Sequence[int], copy: float) -> list[dict[str, object]]:
    """Measure and print one row for each number of tokens for which the kernels compile."""
    layer = ExpertLayer(shape) if form is None else PackedExpertLayer(shape, form)
    failures = compile_steps((layer, count, None) for count in tokens)
    rows: list[dict[str, object]] = []
    for count, failure in zip(tokens, failures, strict=True):
        if failure is not None:
            print(f"{shape} {form} {count}: {failure}")
            continue
        step = layer.measure(count)
        share = step.bytes / step.seconds / copy
        print(
            f"{shape:18} {form or 'bfloat16':10} {count:6} {step.hit:6.1f} {step.expected_hit:7.1f}"
            f" {step.seconds * 1e6:9.1f} {share:8.1%} {step.flops / step.seconds / 1e12:8.1f}",
            flush=True,
        )
        row = {"shape": shape, "tokens": count, "experts_hit": round(step.hit, 2)} | ({"form": form} if form else {})
        rows.append(
            row
            | {
                "experts_hit_by_formula": round(step.expected_hit, 2),
                "us": round(step.seconds * 1e6, 2),
                "copy_share": round(share, 4),
                "tflops": round(step.flops / step.seconds / 1e12, 1),
            }
        )
    return rows


def _tune(shapes: Sequence[str], forms: Sequence[str], copy: float) -> list[dict[str, object]]:
    """Return and print the best tiles of each shape, with 16-bit weights or with those of each form."""
    rows: list[dict[str, object]] = []
    print("PACKED_TUNED = {" if forms else "TUNED = {")
    for shape, form in product(shapes, forms or (None,)):
        layer = ExpertLayer(shape) if form is None else PackedExpertLayer(shape, form)
        key = layer.shape if form is None else (layer.shape, form_of(layer.experts))
        print(f"    {key}: {{  # {shape}")
        for result in tuned(layer):
            share, before = (step.bytes / step.seconds / copy for step in (result.best, result.default))
            comment = f"{result.tokens} tokens: {share:.1%} of copy, before {before:.1%}"
            size = 1 if result.tokens == 1 else result.tile.tokens
            print(f"        {size}: {result.tile},  # {comment}", flush=True)
            rows.append(
                {
                    "shape": shape,
                    **({"form": form} if form else {}),
                    "tokens": result.tokens,
                    "tile": str(result.tile),
                    "copy_share": round(share, 4),
                    "copy_share_before": round(before, 4),
                }
            )
        print("    },")
    print("}")
    return rows
