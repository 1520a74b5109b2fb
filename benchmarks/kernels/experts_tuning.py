"""Searches the fastest tiles of a mixture of experts; run by `python -m benchmarks.kernels experts --tune`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.kernels.experts_timing import FORMS, ExpertLayer, ExpertStep, PackedExpertLayer, compile_steps
from tandem.engine.config.quantization import Codes
from tandem.engine.kernels.experts.expert_tiles import (
    MOST_TOKENS,
    PACKED_TILES,
    SCALED_TILES,
    TILES,
    TOKENS_OF_TILES,
    ExpertShape,
    ExpertTile,
    ProductTile,
    fitting,
)

_LONG_AVERAGE = 128
"""Average number of tokens per expert for which the largest tile is tuned."""

GATE_UP = {
    1: [ProductTile(1, 1024, 1, 4), ProductTile(4, 512, 1, 4), ProductTile(2, 2048, 1, 8), ProductTile(4, 1024, 1, 8)],
    16: [ProductTile(32, 128, 4, 4), ProductTile(32, 256, 3, 4), ProductTile(64, 64, 5, 4), ProductTile(64, 128, 4, 4)],
    32: [ProductTile(64, 128, 3, 4), ProductTile(64, 64, 4, 4), ProductTile(128, 64, 4, 8)],
    64: [ProductTile(64, 64, 3, 4), ProductTile(128, 64, 3, 8), ProductTile(128, 64, 4, 8)],
    128: [ProductTile(128, 64, 4, 8), ProductTile(64, 64, 4, 4), ProductTile(64, 128, 3, 8)],
}
DOWN = {
    1: [ProductTile(1, 2048, 1, 4), ProductTile(2, 4096, 1, 4), ProductTile(4, 1024, 1, 4), ProductTile(4, 2048, 1, 8)],
    16: [
        ProductTile(64, 128, 4, 4),
        ProductTile(64, 256, 3, 4),
        ProductTile(128, 64, 5, 4),
        ProductTile(128, 128, 4, 4),
    ],
    32: [ProductTile(128, 128, 3, 4), ProductTile(64, 128, 4, 4), ProductTile(256, 64, 4, 8)],
    64: [ProductTile(128, 64, 3, 4), ProductTile(128, 128, 3, 8), ProductTile(256, 64, 3, 8)],
    128: [ProductTile(128, 64, 4, 4), ProductTile(128, 64, 4, 8), ProductTile(256, 64, 4, 8)],
}
"""Candidates in addition to the default ones, by tokens per tile."""
_PACKED_ROWS = (16, 32, 64, 128)
_PACKED_STAGES = ((3, 4), (5, 4), (4, 8))
"""Stages and warps of the candidates for packed weights."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The fastest tile, its measured step, and the step with the default tile."""

    tokens: int
    tile: ExpertTile
    best: ExpertStep
    default: ExpertStep


def tuned(layer: ExpertLayer) -> Iterator[Tuned]:
    """Yield the fastest tile for each number of tokens.

    The part of the tile for each of the two products is chosen with the default part for the other product.
    """
    form = layer.form if isinstance(layer, PackedExpertLayer) else None
    sizes = {size: tokens_of(size, layer.shape) for size in TILES}
    steps = [(layer, tokens, tile) for size, tokens in sizes.items() for tile in candidates(size, layer.shape, form)]
    failures = compile_steps(steps)
    working: dict[int, list[ExpertTile]] = {tokens: [] for tokens in sizes.values()}
    for (_, tokens, tile), failure in zip(steps, failures, strict=True):
        if failure is None:
            working[tokens].append(tile)
        else:
            print(f"        # left out: {tile}: {failure}")
    for tokens, tiles in working.items():
        yield _fastest(layer, tokens, tiles)


def tokens_of(size: int, shape: ExpertShape) -> int:
    """Return the number of tokens of the largest step that uses tiles of `size` tokens.

    The largest tile has no such limit; for it, a typical number of tokens is returned.
    """
    if size == 1:
        return 1
    averages = {tokens: most for most, tokens in TOKENS_OF_TILES} | {MOST_TOKENS: _LONG_AVERAGE}
    return max(2, averages[size] * shape.experts // shape.top_k)


def candidates(size: int, shape: ExpertShape, form: str | None = None) -> list[ExpertTile]:
    """Return the default tile, then tiles that differ from it in one product; `form` is one of `FORMS`."""
    if form is not None:
        return _packed_candidates(size, form)
    default = TILES[size]
    tiles = [
        default,
        *(replace(default, gate_up=product_tile) for product_tile in GATE_UP[size]),
        *(replace(default, down=product_tile) for product_tile in DOWN[size]),
    ]
    return tiles if size == 1 else list(dict.fromkeys(fitting(tile, shape) for tile in tiles))


def _packed_candidates(size: int, form: str) -> list[ExpertTile]:
    codes, group, inputs = FORMS[form]
    # A step of one token has a tile of its own, for few programs instead of one for each expert's tokens.
    default = (SCALED_TILES if inputs else PACKED_TILES)[max(size, min(PACKED_TILES))]
    # The kernels for other forms read as many columns as share a scale.
    columns = (64, 128) if codes is Codes.FLOAT4 or (inputs and not group) else (default.down.columns,)
    products = [
        ProductTile(rows, count, stages, warps)
        for rows in _PACKED_ROWS
        for count in columns
        for stages, warps in _PACKED_STAGES
    ]
    tiles = [
        default,
        *(replace(default, gate_up=product) for product in products),
        *(replace(default, down=product) for product in products),
    ]
    return list(dict.fromkeys(tiles))


def _fastest(layer: ExpertLayer, tokens: int, tiles: Sequence[ExpertTile]) -> Tuned:
    default, *_ = tiles
    steps = {tile: layer.measure(tokens, tile) for tile in tiles}

    def seconds(tile: ExpertTile) -> float:
        return steps[tile].seconds

    gate_up = min((tile for tile in tiles if tile.down == default.down), key=seconds).gate_up
    down = min((tile for tile in tiles if tile.gate_up == default.gate_up), key=seconds).down
    best = replace(default, gate_up=gate_up, down=down)
    return Tuned(tokens, best, layer.measure(tokens, best), steps[default])
