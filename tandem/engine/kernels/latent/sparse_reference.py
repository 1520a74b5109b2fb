"""Sparse latent attention in plain PyTorch: the choice of tokens, and attention to the chosen ones."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.config.attention import IndexShape, LatentShape
from tandem.engine.kernels.base import Kernels, StepLayout
from tandem.engine.kernels.layers import IndexQueries, LatentLayer

_ELEMENTS = 1 << 24
"""The number of scores, or of elements of gathered latents, that are computed at a time; it bounds the memory."""


class PlainSparse(Kernels):
    """Kernels that compute sparse attention in plain PyTorch."""

    def choose_tokens(self, index: IndexQueries, layer: LatentLayer, cache: Tensor, layout: StepLayout) -> Tensor:
        """Compute the scores of each row's cached tokens, and choose the highest."""
        shape, starts = _index_of(layer.shape), layout.row_starts.tolist()
        chosen = torch.full((len(index.q), shape.top_k), -1, dtype=torch.int32)
        for row, context in enumerate(layout.context_lens.tolist()):
            used = layout.page_table[row, : -(-context // cache.shape[4])].long()
            keys = cache[used, layer.index, 0, 0, :, layer.shape.projected :].flatten(0, 1)[:context]
            for tokens in _chunks(starts[row], starts[row + 1], shape.heads * context):
                scores = _scores(index.q[tokens], index.weights[tokens], keys)
                unseen = torch.arange(context) > layout.positions[tokens].unsqueeze(1)
                best = best_tokens(scores.masked_fill_(unseen, float("-inf")), shape.top_k)
                chosen[tokens, : best.shape[1]] = best
        return chosen

    def sparse_attention(
        self, q: Tensor, chosen: Tensor, layer: LatentLayer, cache: Tensor, layout: StepLayout
    ) -> Tensor:
        """Compute absorbed attention in at least float32, so that only the chosen latents are read."""
        shape, starts, page_tokens = layer.shape, layout.row_starts.tolist(), cache.shape[4]
        wide = torch.promote_types(q.dtype, torch.float32)
        kv_up, out = layer.kv_up.to(wide), q.new_empty(len(q), shape.heads * shape.v_dim)
        for row, table in enumerate(layout.page_table.long()):
            for tokens in _chunks(starts[row], starts[row + 1], chosen.shape[1] * shape.cached):
                positions = chosen[tokens].long()
                known = positions.clamp(min=0)
                page, offset = table[known // page_tokens], known % page_tokens
                stored = cache[page, layer.index, 0, 0, offset, : shape.projected].to(wide)
                # Entries without a token name position 0, whose latent may be unwritten in a row of padding.
                stored = stored.masked_fill_((positions < 0).unsqueeze(-1), 0.0)
                out[tokens] = _attend(q[tokens].to(wide), stored, positions < 0, kv_up, shape).to(q.dtype)
        return out


def best_tokens(scores: Tensor, top_k: int) -> Tensor:
    """Return the positions [T, up to top_k] int32 of the highest scores [T, positions], -1 for scores of -inf."""
    best = scores.topk(min(top_k, scores.shape[1]), dim=-1)
    return best.indices.masked_fill(best.values == float("-inf"), -1).int()


def _scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return the index scores [tokens, context] in at least float32; q [tokens, heads, dim], keys [context, dim]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    products = F.relu(q.to(wide) @ keys.to(wide).t() * q.shape[-1] ** -0.5)
    return torch.einsum("th,thc->tc", weights.to(wide) * weights.shape[-1] ** -0.5, products)


def _attend(q: Tensor, stored: Tensor, absent: Tensor, kv_up: Tensor, shape: LatentShape) -> Tensor:
    """Attend with q [tokens, heads, nope + rope] to latents [tokens, chosen, latent + rope] → [tokens, heads·v_dim]."""
    keys, values = kv_up[:, : shape.nope], kv_up[:, shape.nope :]
    absorbed = torch.cat((torch.einsum("thd,hdl->thl", q[..., : shape.nope], keys), q[..., shape.nope :]), dim=-1)
    scores = absorbed @ stored.transpose(1, 2) * shape.scale
    weights = torch.softmax(scores.masked_fill_(absent.unsqueeze(1), float("-inf")), dim=-1)
    mixed = weights @ stored[..., : shape.latent]
    return torch.einsum("thl,hvl->thv", mixed, values).flatten(1)


def _chunks(start: int, end: int, elements: int) -> list[slice]:
    """Return slices of the tokens start .. end; a token has `elements` elements."""
    length = max(_ELEMENTS // max(elements, 1), 1)
    return [slice(first, min(first + length, end)) for first in range(start, end, length)]


def _index_of(shape: LatentShape) -> IndexShape:
    assert shape.index is not None
    return shape.index
