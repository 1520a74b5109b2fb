"""Measures and tunes single kernels on a GPU: `python -m benchmarks.kernels CASE`.

`fused` compares fused operations with their parts. `attention`, `latent`, `experts`, `products`, `gated` and `state`
measure one kind of kernel with the engine's tiles and with candidates, and print lines for the engine's tables. `forms`
compares kinds of attention, and `order` two orders of a product's tiles. The last line is one JSON object.
"""

import sys

from benchmarks.command_line import need_gpu, run_case

CASES = {
    **{name: f"benchmarks.kernels.{name}" for name in ("fused", "attention", "latent", "experts", "products", "gated")},
    "state": "benchmarks.kernels.state",
    "forms": "benchmarks.kernels.attention_forms",
    "order": "benchmarks.kernels.tile_order",
}

if __name__ == "__main__":
    if not {"-h", "--help"} & {*sys.argv[1:2]}:
        need_gpu()  # without a GPU, Triton is not installed either
    run_case("kernels", __doc__, CASES)
