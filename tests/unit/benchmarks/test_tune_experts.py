"""The candidates of the experts' tiles: the default one is among them, and each is measured with its own tokens."""

import pytest

pytest.importorskip("triton")

from benchmarks.kernels.experts_tuning import candidates, tokens_of
from tandem.engine.kernels.experts import expert_tiles
from tandem.engine.kernels.experts.expert_tiles import TILES, ExpertShape, tile_for

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
