"""Every product of every shape that ships has a tile for packed weights that a GPU can run, measured or by the rule."""

import pytest

from benchmarks.kernels.dense_layer import Product, dense_shapes, model_of
from benchmarks.kernels.product_candidates import packed_candidates
from tandem.engine.kernels.linear.triton_linear_plan import fits_scratch
from tandem.engine.kernels.linear.triton_linear_tiles import Skinny
from tandem.engine.kernels.packed import packed_tiles
from tandem.engine.kernels.packed.packed_tiles import TUNED, tile_for
from tandem.engine.models.shapes import shape_config

TOKENS = (1, 16, 17, 64, 128, 512)
SHARED_BYTES = 227 << 10
"""The shared memory that one program of an H100 or H200 may have."""
SUMS_PER_THREAD = 128
COLUMNS = {8: 128, 4: 64}
"""Bytes of codes that a step reads, by bits."""


def check(tile: Skinny, product: Product, tokens: int, bits: int) -> None:
    weights = 2 if product.paired else 1
    inputs = 2 * tile.tokens * tile.columns * 8 // bits
    shared = (tile.stages - 1) * (tile.columns * tile.rows * weights + inputs) + inputs
    assert shared <= SHARED_BYTES, (product.name, tile)
    assert tile.rows * tile.tokens * weights <= SUMS_PER_THREAD * 32 * tile.warps, (product.name, tile)
    assert tile.tokens >= min(tokens, 128), (product.name, tile)
    assert tile.splits * tile.columns <= product.k * bits // 8, (product.name, tile)
    tiles = -(-product.outputs // tile.rows) * -(-tokens // tile.tokens)
    assert fits_scratch(tile, tiles, product.paired), (product.name, tile)


@pytest.mark.parametrize("measured", [True, False], ids=["measured", "by the rule"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", dense_shapes())
def test_every_product_has_a_tile_that_fits(
    name: str, bits: int, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not measured:
        monkeypatch.setattr(packed_tiles, "TUNED", {})
    for product in model_of(name, shape_config(name)).products:
        for tokens in TOKENS:
            for columns in (COLUMNS[bits], 32):
                tile = tile_for.__wrapped__(tokens, product.n, product.k, product.paired, bits, columns)
                assert tile.columns == columns, "a step of more columns would have two scales"
                check(tile, product, tokens, bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_all_candidates_fit(bits: int) -> None:
    for product in model_of("llama-3-8b", shape_config("llama-3-8b")).products:
        for tokens in TOKENS[:-1]:
            tiles = list(packed_candidates(product, tokens, bits, COLUMNS[bits]))
            assert len(set(tiles)) == len(tiles) > 2, (product.name, tokens)
            for tile in tiles:
                check(tile, product, tokens, bits)


def test_measured_tiles_read_whole_steps() -> None:
    for (bits, *_), by_bucket in TUNED.items():
        assert all(tile.columns == COLUMNS[bits] and tile.tokens == bucket for bucket, tile in by_bucket.items())
