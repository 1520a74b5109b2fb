"""The choice of tiles: never too few, and the same for every step in float32."""

import itertools
import random
from collections import Counter

import pytest

from tandem.engine.kernels.experts.expert_tiles import (
    FLOAT_TILE,
    MOST_TOKENS,
    TILES,
    TUNED,
    ExpertShape,
    max_tiles,
    router_tile,
    tile_for,
)

QWEN = ExpertShape(experts=128, top_k=8, hidden=2048, width=768)
GPT = ExpertShape(experts=32, top_k=4, hidden=2880, width=2880)


@pytest.mark.parametrize(("experts", "size"), [(1, 16), (5, 16), (128, 16), (8, 128)])
def test_the_maximum_of_tiles_is_reached_and_never_exceeded(experts: int, size: int) -> None:
    for pairs in (1, 2, 15, 16, 17, 64, 300, 1024):
        most = max_tiles(pairs, experts, size)
        hit = min(pairs, experts)
        worst = [1] * (hit - 1) + [pairs - hit + 1]
        drawn = random.choices(range(experts), k=pairs)
        for counts in (worst, list(Counter(drawn).values())):
            assert sum(-(-count // size) for count in counts) <= most
        assert most <= pairs


def test_tiles_grow_with_the_tokens_of_an_expert() -> None:
    sizes = [tile_for(tokens, QWEN, 2).tokens for tokens in (1, 2, 128, 129, 256, 512, 1024, 8192)]
    assert sizes == [1, 16, 16, 32, 32, 64, 128, 128]
    assert set(sizes) | {MOST_TOKENS} == set(TILES)


def test_columns_divide_the_inputs_where_some_do() -> None:
    for tokens, shape in itertools.product((2, 512, 8192), (QWEN, GPT)):
        tile = tile_for(tokens, shape, 2)
        assert shape.hidden % tile.gate_up.columns == 0
        assert shape.width % tile.down.columns == 0


def test_a_measured_tile_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TUNED, ExpertShape(4, 2, 64, 32), {16: FLOAT_TILE})
    assert tile_for(3, ExpertShape(4, 2, 64, 32), 2) is FLOAT_TILE


def test_float32_has_one_tile() -> None:
    assert {tile_for(tokens, QWEN, 4) for tokens in (1, 7, 4096)} == {FLOAT_TILE}
    assert len({router_tile(tokens, QWEN, 4) for tokens in (1, 7, 4096)}) == 1


def test_the_routers_product_has_no_empty_splits() -> None:
    for tokens, shape in itertools.product((1, 16, 33, 256, 4096), (QWEN, GPT, ExpertShape(4, 2, 40, 24))):
        tile = router_tile(tokens, shape, 2)
        assert 1 <= tile.splits <= max(shape.hidden // tile.columns, 1)
