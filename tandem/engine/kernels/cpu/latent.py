"""Latent attention on CPUs: absorbed for one-token rows, all heads at a time, and expanded for longer rows.

Each row is computed separately, so a token's numbers do not depend on the other tokens of the step.
"""

import torch
from torch import Tensor

from tandem.engine.config.attention import LatentShape
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import LatentCache
from tandem.engine.kernels.layers import LatentLayer
from tandem.engine.kernels.reference import attend_latents, gather_latents


def latent_attention(q: Tensor, layer: LatentLayer, cache: LatentCache, layout: StepLayout) -> Tensor:
    """Compute causal attention over latents, as `Kernels.latent_attention` defines it.

    Absorbed attention is computed in float32, and only its result is rounded.
    """
    shape, kv_up = layer.shape, layer.kv_up
    starts, contexts = layout.row_starts.tolist(), layout.context_lens.tolist()
    out = q.new_empty(len(q), shape.heads * shape.v_dim)
    wide = kv_up.float() if layout.single_rows else kv_up
    for row, context in enumerate(contexts):
        first, end = starts[row], starts[row + 1]
        single = row < layout.single_rows
        dtype = torch.float32 if single else q.dtype
        stored = gather_latents(cache, layer.index, layout.page_table[row], context, dtype)
        if single:
            out[first] = _absorbed(q[first].float(), stored, wide, shape)
        else:
            out[first:end] = attend_latents(q[first:end], stored, kv_up, layout.positions[first:end], shape)
    return out


def _absorbed(q: Tensor, stored: Tensor, kv_up: Tensor, shape: LatentShape) -> Tensor:
    """Attend with a token's q [heads, nope + rope] to its latents [context, latent + rope] → [heads·v_dim]."""
    keys, values = kv_up[:, : shape.nope], kv_up[:, shape.nope :]
    absorbed = torch.bmm(q[:, None, : shape.nope], keys).squeeze(1)
    query = torch.cat((absorbed, q[:, shape.nope :]), dim=-1)
    weights = torch.softmax(query @ stored.t() * shape.scale, dim=-1)
    mixed = weights @ stored[:, : shape.latent]
    return torch.bmm(values, mixed.unsqueeze(2)).flatten()
