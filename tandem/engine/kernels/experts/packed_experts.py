"""Packed weights of experts on GPUs: their form, and the launch of their products.

Steps of one token have tiles, too. Inputs stay in the model's dtype whatever the scheme: an expert has few tokens, so
that reading its weights takes most of the time.
"""

from dataclasses import replace

import torch
import triton
from torch import Tensor

from tandem.engine.kernels.base import Experts
from tandem.engine.kernels.experts.expert_tiles import (
    PACKED_FLOAT_TILE,
    PACKED_TILES,
    ExpertShape,
    ExpertTile,
    tile_tokens,
)
from tandem.engine.kernels.experts.triton_packed_experts import packed_tile_kernel
from tandem.engine.kernels.held_weight import multiplied_on_gpus, step_bytes
from tandem.engine.kernels.packed import packed_products, products
from tandem.engine.kernels.packed_weight import PackedWeight, Weight
from tandem.engine.kernels.unpacked import as_matrix


def prepared_experts(experts: Experts, dtype: torch.dtype) -> Experts:
    """Returns the experts with their packed weights as kernels read them, dequantized if there are none for one."""
    shared_gate_up, shared_down = (
        None if each is None else products.prepared(each, dtype)
        for each in (experts.shared_gate_up, experts.shared_down)
    )
    gate_up, down = _prepared(experts.gate_up, dtype), _prepared(experts.down, dtype)
    return replace(experts, gate_up=gate_up, down=down, shared_gate_up=shared_gate_up, shared_down=shared_down)


def _prepared(weight: Weight, dtype: torch.dtype) -> Weight:
    """Returns stacked weights as kernels read them, dequantized if there are none for them."""
    if not isinstance(weight, PackedWeight) or not multiplied_on_gpus(weight):
        return as_matrix(weight, dtype)
    return packed_products.prepared(weight)


def packed_tile(tokens: int, shape: ExpertShape, item_bytes: int) -> ExpertTile:
    """Returns the tile for a step of `tokens` tokens; its columns are those of the weight."""
    return PACKED_FLOAT_TILE if item_bytes == 4 else PACKED_TILES[tile_tokens(tokens, shape)]


def launch(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    pair_weights: Tensor,
    tiles: Tensor,
    order: Tensor,
    out: Tensor,
    tile: ExpertTile,
    *,
    top_k: int,
    activation: int | None,
    pdl: bool,
) -> None:
    """Launches `packed_tile_kernel` for all tiles; `activation` of the gated product, None = the other one."""
    product = tile.down if activation is None else tile.gate_up
    pairs, outputs = out.shape
    most = len(tiles) - 1
    packed_tile_kernel[(most, triton.cdiv(outputs, product.rows))](
        x, weight.codes.view(torch.int32), weight.scales, weight.scales if weight.offsets is None else weight.offsets,
        x if bias is None else bias, pair_weights, tiles, order, out, pairs, most, *weight.scales.stride(),
        N=outputs, K=x.shape[1], E=len(weight), TOP_K=top_k, GATED=activation is not None, ACTIVATION=activation or 0,
        BIAS=bias is not None, GROUP=weight.group, BITS=weight.bits, FP8=weight.codes.dtype.is_floating_point,
        OFFSETS=weight.offsets is not None, ROWS=product.rows, TOKENS=tile.tokens, COLUMNS=step_bytes(weight),
        STAGES=product.stages, PDL=pdl, num_warps=product.warps, launch_pdl=pdl,
    )  # fmt: skip
