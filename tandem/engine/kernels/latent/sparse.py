"""Sparse latent attention on GPUs: the choice of tokens, and absorbed attention to them.

Absorbed attention reads each tile's tokens through a page table. The chosen tokens are passed to it as pages of one
token, so that it reads them in place and nothing is copied.
"""

import math

import torch
from torch import Tensor

from tandem.engine.config.attention import LatentShape
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.latent.absorbed import AbsorbedAttention
from tandem.engine.kernels.latent.sparse_reference import best_tokens
from tandem.engine.kernels.latent.triton_index import index_scores
from tandem.engine.kernels.layers import IndexQueries, LatentLayer

_SCORES = 1 << 26
"""Number of scores in memory at a time: 256 MiB."""


class SparseAttention:
    """Sparse attention of the layers of one shape. It holds no state between calls."""

    def __init__(self, shape: LatentShape, device: torch.device, dtype: torch.dtype, pdl: bool, tokens: int) -> None:
        """Prepare the layers of `shape`; `tokens` is the number of tokens whose attention is computed at a time."""
        self._shape, self._tokens = shape, tokens
        self._attention = AbsorbedAttention(shape, 1, device, dtype, pdl)

    @staticmethod
    def choose(index: IndexQueries, rows: Tensor, layer: LatentLayer, cache: Tensor, layout: StepLayout) -> Tensor:
        """Compute `Kernels.choose_tokens`; `rows` are those of `rows_of`.

        All shapes depend on host numbers only, as CUDA graphs require.
        """
        assert layer.shape.index is not None
        count, top_k = len(index.q), layer.shape.index.top_k
        positions = min(layout.page_table.shape[1] * cache.shape[4], layout.max_context)
        chosen = torch.full((count, top_k), -1, dtype=torch.int32, device=cache.device)
        length = max(_SCORES // positions, 1)
        for first in range(0, count, length):
            tokens = slice(first, min(first + length, count))
            scores = torch.empty(tokens.stop - first, positions, dtype=torch.float32, device=cache.device)
            index_scores(index, rows, tokens, layer, cache, layout, scores)
            best = best_tokens(scores, top_k)
            chosen[tokens, : best.shape[1]] = best
        return chosen

    def attend(
        self, q: Tensor, chosen: Tensor, rows: Tensor, layer: LatentLayer, cache: Tensor, layout: StepLayout
    ) -> Tensor:
        """Compute `Kernels.sparse_attention`; `rows` are those of `rows_of`."""
        shape, page_tokens = self._shape, cache.shape[4]
        # Addresses are counted in units that divide a page and a token, so that 32 bits hold them.
        unit = math.gcd(cache.stride(0), shape.cached)
        known = chosen.clamp(min=0).long()
        page = layout.page_table[rows.long()].long().gather(1, known // page_tokens)
        addresses = ((page * cache.stride(0) + known % page_tokens * shape.cached) // unit).int()
        contexts = (chosen >= 0).sum(1, dtype=torch.int32)
        base = cache.storage_offset() + cache.stride(1) * layer.index
        tokens = torch.as_strided(cache, (1, 1, 1, 1, 1, shape.projected), (unit, 0, 0, 0, 0, 1), base)
        out = q.new_empty(len(q), shape.heads * shape.v_dim)
        for first in range(0, len(q), self._tokens):
            part = slice(first, first + self._tokens)
            self._attention.begin_step(tokens, addresses[part], contexts[part])
            self._attention(q[part], layer.kv_up, tokens, 0, out[part])
        return out


def rows_of(layout: StepLayout) -> Tensor:
    """Return the row [T] int32 of each of the step's tokens; a token in no row gets the last row."""
    number = torch.arange(len(layout.positions), dtype=torch.int32, device=layout.row_starts.device)
    rows = torch.searchsorted(layout.row_starts, number, right=True, out_int32=True) - 1
    return rows.clamp(max=len(layout.context_lens) - 1)
