"""Measures the fused gate/up product with SiLU, tile by tile, against cuBLAS followed by SiLU.

    python -m benchmarks.kernels gated

All forms alternate on a chip that was heated first: a kernel measured after a pause, such as a compilation, would run
above the clock that the power limit sustains. The engine's choice is in tandem/engine/kernels/linear/gated_product.py.
"""

import argparse
from itertools import count

import torch
from torch import Tensor

from benchmarks.command_line import Measured
from benchmarks.gpu_timing import Contestant, race
from benchmarks.results import run_facts
from tandem.engine.kernels.layers import Linear
from tandem.engine.kernels.linear.gated_product import FusedGated, GatedTile, PlainGated
from tandem.engine.kernels.triton_launch import overlaps_launches

SHAPES = {"llama-3-8b": (4096, 14336), "llama-3.2-1b": (2048, 8192), "qwen3-0.6b": (1024, 3072)}
"""Hidden and intermediate size by shape."""
TOKENS = (512, 1024, 2048, 4096, 8192)
TILES = ((256, 192, False), (256, 160, False), (128, 256, False), (256, 128, False), (128, 160, True), (128, 192, True))
"""(rows, columns, True if two warp groups compute separate tiles in turn)."""
CLUSTERS = ((2, 1), (1, 2))
_WEIGHTS = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add nothing, because this case has no options."""


def measure(options: argparse.Namespace) -> Measured:
    """Measure and print the best tiles of each size."""
    del options
    contests: dict[str, dict[str, float]] = {}
    for name, (hidden, intermediate) in SHAPES.items():
        for tokens in TOKENS:
            times_us = race(_contestants(hidden, intermediate, tokens))
            contests[f"{name} {tokens}"] = times_us
            best = sorted(times_us, key=lambda contestant: times_us[contestant])[:3]
            words = ", ".join(
                f"{contestant} {times_us[contestant]:.1f} us ({times_us['cublas'] / times_us[contestant]:.3f})"
                for contestant in best
            )
            print(f"{name} {tokens} tokens: cublas {times_us['cublas']:.1f} us; {words}", flush=True)
    return "tune-gated", {"us": contests, "dtype": "bfloat16", **run_facts("cuda")}


def _contestants(hidden: int, intermediate: int, tokens: int) -> dict[str, Contestant]:
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    weights: list[Tensor] = [
        torch.randn(2 * intermediate, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5
        for _ in range(_WEIGHTS)
    ]
    turns = count()
    plain = PlainGated(overlaps_launches())

    def weight() -> Tensor:
        return weights[next(turns) % _WEIGHTS]

    def race_with(tile: GatedTile) -> Contestant:
        fused = FusedGated(plain, tile)
        return lambda: fused.compute(x, weight())

    contestants: dict[str, Contestant] = {"cublas": lambda: plain(x, Linear(weight()))}
    for rows, columns, pingpong in TILES:
        for cluster in CLUSTERS:
            kind = "pingpong" if pingpong else "cooperative"
            name = f"{rows}x{columns} {kind} {cluster[0]}x{cluster[1]}"
            contestants[name] = race_with(GatedTile(rows, columns, pingpong, *cluster))
    return contestants
