"""The candidates of the experts' tiles: the default one is among them, and each is measured with its own tokens."""

import pytest

pytest.importorskip("triton")

from benchmarks.kernels.experts_timing import FORMS
from benchmarks.kernels.experts_tuning import candidates, tokens_of
from tandem.engine.kernels.experts import expert_tiles
from tandem.engine.kernels.experts.expert_tiles import (
    QUANTIZED_INPUTS,
    TILES,
    ExpertShape,
    ExpertTile,
    ProductTile,
    tile_for,
)

SHAPES = [ExpertShape(128, 8, 2048, 768), ExpertShape(64, 6, 2048, 1408), ExpertShape(32, 4, 2880, 2880)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", TILES)
def test_a_tile_is_measured_with_steps_that_have_it(
    size: int, shape: ExpertShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates begin with the tile of shapes that were not tuned."""
    monkeypatch.setattr(expert_tiles, "TUNED", {})
    tokens = tokens_of(size, shape)
    default, *others = candidates(size, shape)
    assert default == tile_for.__wrapped__(tokens, shape, 2)
    assert default not in others
    assert {tile.tokens for tile in others} == {size}
    assert all(tile.gate_up == default.gate_up or tile.down == default.down for tile in others)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", TILES)
def test_tiles_of_packed_weights_differ_from_the_default_in_one_product(size: int, form: str) -> None:
    tokens = tokens_of(size, SHAPES[0])
    default, *others = candidates(size, SHAPES[0], form)
    assert default == tile_for(tokens, SHAPES[0], 2, "fp8" + QUANTIZED_INPUTS if "inputs" in form else "fp8")
    assert default not in others
    assert len(others) >= 20
    assert {tile.tokens for tile in others} == {default.tokens}
    assert all(tile.gate_up == default.gate_up or tile.down == default.down for tile in others)


def test_a_measured_tile_of_packed_weights_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = ExpertTile(16, ProductTile(16, 64, 3, 4), ProductTile(32, 64, 3, 4))
    monkeypatch.setattr(expert_tiles, "PACKED_TUNED", {(SHAPES[0], "fp4"): {1: tile}})
    tiles = [tile_for.__wrapped__(tokens, SHAPES[0], 2, "fp4") for tokens in (1, 2)]
    assert tiles == [tile, expert_tiles.PACKED_TILES[16]]
    assert tile_for.__wrapped__(1, SHAPES[0], 2, "fp8") != tile
    assert tile_for.__wrapped__(1, SHAPES[0], 4, "fp4") == expert_tiles.PACKED_FLOAT_TILE
