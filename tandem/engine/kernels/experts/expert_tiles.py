"""The tiles of the experts' products, chosen by the average number of tokens per expert.

A tile holds tokens of a single expert, so larger tiles read weights less often and compute more padding. The tiles are
for an H200: a multiprocessor has 227 KiB of shared memory, and must have about 32 KiB of loads in flight for the full
memory bandwidth. `python -m benchmarks.kernels experts --tune` measures other tiles and prints lines for `TUNED`.
Nothing here needs torch or Triton.
"""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The tile of one product: a program multiplies `rows` rows of an expert's weight, `columns` at a time.

    In the gated product, these are `rows` rows of gate and `rows` rows of up. `stages` is the depth of the load
    pipeline.
    """

    rows: int
    columns: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """The tiles of the gate/up product and of the down product, with `tokens` tokens of one expert in a tile.

    `tokens` = 1 selects the kernels for steps of a single token. There, a program of the down product reads the weights
    of all `top_k` experts of the token, and `down.columns` is the total over these experts: each of them gets
    `down.columns` / `top_k` columns, with `top_k` rounded up to a power of two. `stages` is unused in these kernels,
    because all loads of a program are in flight together.
    """

    tokens: int
    gate_up: ProductTile
    down: ProductTile


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The sizes of a mixture of experts; `hidden` and `width` (the intermediate size) are in elements."""

    experts: int
    top_k: int
    hidden: int
    width: int

    def tokens_an_expert(self, tokens: int) -> float:
        """Return the average number of tokens per expert in a step of `tokens` tokens."""
        return tokens * self.top_k / self.experts


TOKENS_OF_TILES = ((8, 16), (16, 32), (48, 64))
"""Pairs (maximum average number of tokens per expert, tokens of a tile); nearly all experts fill less than one tile."""
MOST_TOKENS = 128
"""Number of tokens of a tile if an expert has more tokens on average than `TOKENS_OF_TILES` lists."""

TILES = {
    # 16 and 8 KiB of loads in flight for each of the eight programs that fit on a multiprocessor.
    1: ExpertTile(1, gate_up=ProductTile(2, 1024, 1, 4), down=ProductTile(2, 2048, 1, 4)),
    # Two programs a multiprocessor, each with 108 KiB of loads in flight.
    16: ExpertTile(16, gate_up=ProductTile(64, 128, 3, 4), down=ProductTile(128, 128, 3, 4)),
    32: ExpertTile(32, gate_up=ProductTile(64, 64, 5, 4), down=ProductTile(128, 64, 5, 4)),
    64: ExpertTile(64, gate_up=ProductTile(64, 64, 4, 4), down=ProductTile(128, 64, 4, 4)),
    # One program a multiprocessor: 256 x 128 sums in the registers of 8 warps, the most that fit.
    128: ExpertTile(128, gate_up=ProductTile(128, 64, 3, 8), down=ProductTile(256, 64, 3, 8)),
}
"""The tiles of the 16-bit types, by their number of tokens."""

TUNED: dict[ExpertShape, dict[int, ExpertTile]] = {
    # qwen3-30b-a3b on an H200, `python -m benchmarks.kernels experts --tune`.
    ExpertShape(experts=128, top_k=8, hidden=2048, width=768): {
        1: ExpertTile(1, gate_up=ProductTile(2, 2048, 1, 8), down=ProductTile(4, 1024, 1, 4)),
        16: ExpertTile(16, gate_up=ProductTile(64, 128, 3, 4), down=ProductTile(64, 128, 4, 4)),
        32: ExpertTile(32, gate_up=ProductTile(64, 64, 5, 4), down=ProductTile(128, 64, 5, 4)),
        64: ExpertTile(64, gate_up=ProductTile(64, 64, 3, 4), down=ProductTile(128, 64, 4, 4)),
        128: ExpertTile(128, gate_up=ProductTile(128, 64, 4, 8), down=ProductTile(256, 64, 3, 8)),
    },
    # deepseek-v2-lite on an H100, likewise: 71, 95, 91, 82 and 64 % of copy bandwidth, from 68, 94, 90, 81 and 63 %.
    ExpertShape(experts=64, top_k=6, hidden=2048, width=1408): {
        1: ExpertTile(1, gate_up=ProductTile(2, 1024, 1, 4), down=ProductTile(4, 1024, 1, 4)),
        16: ExpertTile(16, gate_up=ProductTile(64, 128, 4, 4), down=ProductTile(64, 128, 4, 4)),
        32: ExpertTile(32, gate_up=ProductTile(64, 128, 3, 4), down=ProductTile(64, 128, 4, 4)),
        64: ExpertTile(64, gate_up=ProductTile(64, 64, 3, 4), down=ProductTile(128, 64, 3, 4)),
        128: ExpertTile(128, gate_up=ProductTile(128, 64, 4, 8), down=ProductTile(256, 64, 4, 8)),
    },
    # gpt-oss-20b on an H100: 77, 92, 92, 86 and 68 %, from 76, 90, 90, 86 and 66 %.
    ExpertShape(experts=32, top_k=4, hidden=2880, width=2880): {
        1: ExpertTile(1, gate_up=ProductTile(1, 1024, 1, 4), down=ProductTile(2, 4096, 1, 4)),
        16: ExpertTile(16, gate_up=ProductTile(64, 64, 5, 4), down=ProductTile(64, 64, 6, 4)),
        32: ExpertTile(32, gate_up=ProductTile(64, 64, 6, 4), down=ProductTile(128, 64, 6, 4)),
        64: ExpertTile(64, gate_up=ProductTile(64, 64, 4, 4), down=ProductTile(128, 64, 3, 4)),
        128: ExpertTile(128, gate_up=ProductTile(128, 64, 4, 8), down=ProductTile(256, 64, 3, 8)),
    },
}
"""Measured tiles of known shapes, which take precedence over `TILES`."""

FLOAT_TILE = ExpertTile(16, gate_up=ProductTile(16, 32, 3, 4), down=ProductTile(32, 32, 3, 4))
"""The tile of float32, the same for every step, so that a token's sums never depend on the other tokens."""

PACKED_TILES = {
    16: ExpertTile(16, gate_up=ProductTile(64, 64, 4, 4), down=ProductTile(64, 64, 5, 4)),
    32: ExpertTile(32, gate_up=ProductTile(64, 64, 4, 4), down=ProductTile(64, 64, 5, 4)),
    64: ExpertTile(64, gate_up=ProductTile(64, 64, 4, 4), down=ProductTile(64, 64, 5, 4)),
    128: ExpertTile(128, gate_up=ProductTile(64, 64, 4, 8), down=ProductTile(128, 64, 4, 8)),
}
"""The tiles of packed weights in the 16-bit types, which have not been measured yet.

`columns` is the number of bytes of FP4 codes that are read at a time. For other packed weights it is replaced by
`held_weight.step_bytes`, and used only for a weight that is not packed, if the layer's other weight is.
"""
SCALED_TILES = {
    16: ExpertTile(16, gate_up=ProductTile(64, 128, 4, 4), down=ProductTile(64, 128, 5, 4)),
    32: ExpertTile(32, gate_up=ProductTile(64, 128, 4, 4), down=ProductTile(64, 128, 5, 4)),
    64: ExpertTile(64, gate_up=ProductTile(64, 128, 4, 4), down=ProductTile(128, 128, 4, 4)),
    128: ExpertTile(128, gate_up=ProductTile(64, 128, 4, 8), down=ProductTile(128, 128, 4, 8)),
}
"""The tiles of products whose inputs are quantized too, which have not been measured yet.

`columns` is the number of bytes that are read at a time, at most those of a group.
"""
PACKED_TUNED: dict[tuple[ExpertShape, str], dict[int, ExpertTile]] = {
    # gpt-oss-20b on an H200, `python -m benchmarks.kernels experts --tune --shapes gpt-oss-20b --forms mxfp4`:
    # 21, 51, 43, 28 and 11 % of copy bandwidth, from 16, 47, 41, 24 and 9 %.
    (ExpertShape(experts=32, top_k=4, hidden=2880, width=2880), "fp4"): {
        1: ExpertTile(16, gate_up=ProductTile(64, 128, 3, 4), down=ProductTile(128, 128, 4, 8)),
        16: ExpertTile(16, gate_up=ProductTile(64, 128, 3, 4), down=ProductTile(128, 128, 3, 4)),
        32: ExpertTile(32, gate_up=ProductTile(64, 64, 3, 4), down=ProductTile(128, 128, 3, 4)),
        64: ExpertTile(64, gate_up=ProductTile(128, 64, 3, 4), down=ProductTile(128, 64, 3, 4)),
        128: ExpertTile(128, gate_up=ProductTile(128, 64, 4, 8), down=ProductTile(128, 64, 3, 4)),
    },
    # qwen3.5-35b-a3b in blocks of FP8 on an H200, likewise: 20, 81, 72, 53 and 17 %, from 18, 75, 60, 53 and 17 %.
    (ExpertShape(experts=256, top_k=8, hidden=2048, width=512), "fp8 with quantized inputs"): {
        1: ExpertTile(16, gate_up=ProductTile(64, 128, 5, 4), down=ProductTile(128, 128, 5, 4)),
        16: ExpertTile(16, gate_up=ProductTile(128, 128, 5, 4), down=ProductTile(128, 128, 5, 4)),
        32: ExpertTile(32, gate_up=ProductTile(128, 128, 5, 4), down=ProductTile(128, 128, 5, 4)),
        64: ExpertTile(64, gate_up=ProductTile(64, 128, 4, 4), down=ProductTile(128, 128, 3, 4)),
        128: ExpertTile(128, gate_up=ProductTile(64, 128, 4, 8), down=ProductTile(128, 128, 3, 4)),
    },
    # The same with 16-bit inputs: 18, 76, 64, 44 and 15 %, from 17, 74, 58, 33 and 15 %.
    (ExpertShape(experts=256, top_k=8, hidden=2048, width=512), "fp8"): {
        1: ExpertTile(16, gate_up=ProductTile(64, 64, 3, 4), down=ProductTile(128, 64, 4, 8)),
        16: ExpertTile(16, gate_up=ProductTile(64, 64, 4, 4), down=ProductTile(128, 64, 3, 4)),
        32: ExpertTile(32, gate_up=ProductTile(128, 64, 3, 4), down=ProductTile(64, 64, 3, 4)),
        64: ExpertTile(64, gate_up=ProductTile(128, 64, 4, 8), down=ProductTile(128, 64, 3, 4)),
        128: ExpertTile(128, gate_up=ProductTile(64, 64, 4, 8), down=ProductTile(64, 64, 3, 4)),
    },
}
"""Measured tiles of known shapes and forms of packed weights, which take precedence over the two tables above.

A form is a string of `packed_experts.form_of`. The tile of key 1 is for steps of one token; it has room for more.
"""
PACKED_FLOAT_TILE = ExpertTile(16, gate_up=ProductTile(16, 32, 3, 4), down=ProductTile(32, 32, 3, 4))
"""The tile of packed weights for inputs in float32, the same for every step."""

QUANTIZED_INPUTS = " with quantized inputs"
"""The end of the forms of packed weights that multiply quantized inputs."""
_LEAST_COLUMNS = 16
_MOST_STAGES = 6
_MOST_ROUTER_SPLITS = 16
_ROUTER_CHUNK = 256
"""Minimum number of columns of a program of the router's product."""
_ROUTER_PROGRAMS = 64
"""Number of programs for which the router's product is split: enough to hide the latency of loads.

With more splits, the choice kernel would have to read more partial sums.
"""


@lru_cache(maxsize=4096)
def tile_for(tokens: int, shape: ExpertShape, item_bytes: int, form: str | None = None) -> ExpertTile:
    """Return the tile for a step of `tokens` tokens, in a dtype of `item_bytes` bytes per element.

    `form` is that of packed weights (`packed_experts.form_of`); None = weights of the dtype.
    """
    if form is not None:
        return _packed_tile(tokens, shape, item_bytes, form)
    if item_bytes == 4:
        return FLOAT_TILE
    size = 1 if tokens == 1 else tile_tokens(tokens, shape)
    tuned = TUNED.get(shape, {}).get(size)
    if tuned is not None:
        return tuned
    return TILES[size] if size == 1 else fitting(TILES[size], shape)


def _packed_tile(tokens: int, shape: ExpertShape, item_bytes: int, form: str) -> ExpertTile:
    if item_bytes == 4:
        return PACKED_FLOAT_TILE
    size = tile_tokens(tokens, shape)
    tuned = PACKED_TUNED.get((shape, form), {}).get(1 if tokens == 1 else size)
    return tuned or (SCALED_TILES if form.endswith(QUANTIZED_INPUTS) else PACKED_TILES)[size]


def tile_tokens(tokens: int, shape: ExpertShape) -> int:
    """Return the number of tokens of a tile in a step of `tokens` tokens."""
    average = shape.tokens_an_expert(tokens)
    return next((size for most, size in TOKENS_OF_TILES if average <= most), MOST_TOKENS)


def max_tiles(pairs: int, experts: int, tile_tokens: int) -> int:
    """Return the maximum number of tiles of `pairs` (token, expert) pairs; each expert may have a partly filled one."""
    return (pairs + (tile_tokens - 1) * min(pairs, experts)) // tile_tokens


def fitting(tile: ExpertTile, shape: ExpertShape) -> ExpertTile:
    """Return the tile with `columns` that divide the input sizes of this shape's products, if possible."""
    return ExpertTile(tile.tokens, _fitting(tile.gate_up, shape.hidden), _fitting(tile.down, shape.width))


def _fitting(tile: ProductTile, k: int) -> ProductTile:
    """Return the tile with `columns` that divide `k`, if possible: partly empty loads cost as much as full ones."""
    columns, stages = tile.columns, tile.stages
    while k % columns and columns > _LEAST_COLUMNS * 2:
        columns, stages = columns // 2, min(2 * stages, _MOST_STAGES)
    return tile if k % columns else ProductTile(tile.rows, columns, stages, tile.warps)


@dataclass(frozen=True, slots=True)
class RouterTile:
    """The tile of the router's product.

    `splits` programs share the columns; the choice kernel adds their partial sums.
    """

    tokens: int
    experts: int
    columns: int
    splits: int


def router_tile(tokens: int, shape: ExpertShape, item_bytes: int) -> RouterTile:
    """Return the tile of the router's product for `tokens` tokens; in float32 it is the same for every step."""
    if item_bytes == 4:
        return RouterTile(tokens=16, experts=16, columns=32, splits=1)
    rows, experts = (16, 16) if tokens <= 64 else (64, 64)
    programs = -(-tokens // rows) * -(-shape.experts // experts)
    most = min(_MOST_ROUTER_SPLITS, max(shape.hidden // _ROUTER_CHUNK, 1))
    return RouterTile(rows, experts, columns=128, splits=max(1, min(most, _ROUTER_PROGRAMS // programs)))
