"""Every product of every shape that ships has a tile that a GPU can run, measured or by the rule."""

import pytest

from benchmarks.kernels.dense_layer import dense_shapes, model_of
from tandem.engine.kernels.linear import triton_linear_plan
from tandem.engine.kernels.linear.triton_linear_plan import fits_scratch, tile_for
from tandem.engine.kernels.linear.triton_linear_tiles import Gemv
from tandem.engine.models.shapes import shape_config

TOKENS = (1, 8, 16, 32, 64, 128, 256)
SHARED_BYTES = 227 << 10
"""The shared memory that one program of an H100 or H200 may have."""
NUMBERS_PER_THREAD = 128
"""The elements that a thread's registers hold besides everything else: float32 sums, or 16-bit weights in flight."""
ITEM_BYTES = 2


@pytest.mark.parametrize("measured", [True, False], ids=["measured", "by the rule"])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", dense_shapes())
def test_every_product_has_a_tile_that_fits(
    name: str, tokens: int, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule is tested where tiles are measured, too: Qwen3-8B and 32B have no measured ones."""
    if not measured:
        monkeypatch.setattr(triton_linear_plan, "TUNED", {})
    for product in model_of(name, shape_config(name)).products:
        tile = tile_for.__wrapped__(tokens, product.n, product.k, product.paired, ITEM_BYTES)
        weights = 2 if product.paired else 1
        sizes = (tile.rows, tile.columns, tile.warps)
        assert all(size & (size - 1) == 0 for size in sizes), tile
        threads = 32 * tile.warps
        if isinstance(tile, Gemv):
            assert tokens == 1
            assert tile.rows * tile.columns * weights <= NUMBERS_PER_THREAD * threads, (product.name, tile)
            continue
        assert tile.tokens >= min(tokens, 128), (product.name, tile)
        shared = ITEM_BYTES * tile.columns * (tile.rows * weights + tile.tokens) * tile.stages
        assert shared <= SHARED_BYTES, (product.name, tile)
        assert tile.rows * tile.tokens * weights <= NUMBERS_PER_THREAD * threads, (product.name, tile)
        assert tile.splits * tile.columns <= product.k, (product.name, tile)
        tiles = -(-product.outputs // tile.rows) * -(-tokens // tile.tokens)
        assert fits_scratch(tile, tiles, product.paired), (product.name, tile)
