"""How to cut decode attention of rows of uneven lengths: `python -m benchmarks.tune_uneven [--models …] [--save]`.

Rows of lognormal lengths, as conversations have them, and rows of one length with as many tokens: the engine's own
plan, and programs that walk over the ends of rows (`benchmarks.attention_candidates`) in several numbers and tiles.
Every call overlaps its neighbours' launches and reads the layout early, as in the engine. Figures are bytes of keys and
values over time, as shares of the copy bandwidth measured in the same run. The last line is one JSON object.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.attention_candidates import WalkingAttention
from benchmarks.attention_timing import DEVICE, DTYPE, PAGE_TOKENS, TOLERANCE, uneven
from benchmarks.ceilings import copy_bandwidth, graph_seconds
from benchmarks.command_line import need_gpu
from benchmarks.results import run_facts, save_result
from engine.kernels.base import AttentionShape
from engine.kernels.triton_attention import LARGE_TILE, SMALL_TILE, DecodeAttention, Plan, make_plan
from engine.models.shapes import shape_config, shape_names

ROWS = (12, 24, 33, 44, 64, 128, 256)
MEAN = 2048
TILES = {"large": LARGE_TILE, "small": SMALL_TILE, "middle": replace(LARGE_TILE, block_tokens=64, stages=3)}
RESIDENT = (1, 2, 3, 4, 6)
"""Programs a multiprocessor may hold, by the tile."""


@dataclass(frozen=True, slots=True)
class Way:
    """Who attends, by what name."""

    name: str
    attention: DecodeAttention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=shape_names(), default=["llama-3-8b"], help="whose heads")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    arguments = parser.parse_args()
    need_gpu()
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e9:.0f} GB/s")
    found: dict[str, Any] = {}
    for model in arguments.models:
        config = shape_config(model)
        shape = AttentionShape(config.heads, config.kv_heads, config.head_dim, config.head_dim**-0.5)
        found[model] = {
            f"{rows} {kind}": _one(shape, lengths, copy, f"{model} {rows:3} {kind:6}")
            for rows in ROWS
            for kind, lengths in (("uneven", uneven(rows, MEAN)), ("equal", [MEAN] * rows))
        }
    result = {"copy_gb_per_s": copy / 1e9, "mean_tokens": MEAN, "shares": found, "dtype": "bfloat16"}
    result |= run_facts("cuda")
    if arguments.save:
        print("saved", save_result("tune-uneven", result))
    print(json.dumps(result))


def _one(shape: AttentionShape, lengths: Sequence[int], copy: float, title: str) -> dict[str, float]:
    """Each way's share of the copy bandwidth, the best first."""
    pages, columns = len(lengths), -(-max(lengths) // PAGE_TOKENS)
    page_bytes = 2 * shape.kv_heads * PAGE_TOKENS * shape.head_dim * DTYPE.itemsize
    layers = max(2, min(16, (2 << 30) // (pages * columns * page_bytes)))
    cache = torch.randn(
        pages * columns, layers, 2, shape.kv_heads, PAGE_TOKENS, shape.head_dim, device=DEVICE, dtype=DTYPE
    )
    table = torch.randperm(pages * columns, device=DEVICE).view(pages, columns).int()
    q = torch.randn(len(lengths), shape.heads, shape.head_dim, device=DEVICE, dtype=DTYPE)
    contexts = torch.tensor(lengths, device=DEVICE, dtype=torch.int32)
    read = sum(lengths) * 2 * shape.kv_heads * shape.head_dim * DTYPE.itemsize
    expected = None
    shares: dict[str, float] = {}
    for way in _ways(shape, len(lengths)):

        def call(number: int, attention: DecodeAttention = way.attention) -> torch.Tensor:
            return attention(q, cache, number % layers, table, contexts)

        got = call(0).float()
        expected = got if expected is None else expected
        if (got - expected).abs().max().item() > TOLERANCE:
            print(f"WRONG: {title} {way.name}")
            continue
        shares[way.name] = round(read / graph_seconds(call, 2 * layers) / copy, 4)
    ranked = dict(sorted(shares.items(), key=lambda item: -item[1]))
    print(f"{title} " + ", ".join(f"{name} {share:.3f}" for name, share in ranked.items()), flush=True)
    return ranked


def _ways(shape: AttentionShape, rows: int) -> Iterator[Way]:
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    yield Way("engine", DecodeAttention(shape, rows, DEVICE, pdl=True, early=True, choose=make_plan))
    for tile, plan in TILES.items():
        counts = {f"{each}/sm": each * sms // shape.kv_heads for each in RESIDENT} | {"rows": rows}
        for name, slots in counts.items():
            chosen = replace(plan, slots=slots)
            yield Way(f"walk {tile} {name}", WalkingAttention(shape, rows, DEVICE, True, True, _always(chosen)))


def _always(plan: Plan) -> Callable[..., Plan]:
    return lambda *_: plan


if __name__ == "__main__":
    main()
