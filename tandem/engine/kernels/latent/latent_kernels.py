"""Latent attention on GPUs: absorbed for rows of few tokens, expanded for prompts."""

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from functools import cached_property

import torch
from torch import Tensor

from tandem.engine.config.attention import LatentShape
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import KvCache, LatentCache, latents_of
from tandem.engine.kernels.latent.absorbed import AbsorbedAttention
from tandem.engine.kernels.latent.absorbed_plan import absorbed_tokens, group_tokens
from tandem.engine.kernels.latent.block_attention import BlockAttention
from tandem.engine.kernels.latent.expanded import ExpandedAttention
from tandem.engine.kernels.latent.sparse import SparseAttention, rows_of
from tandem.engine.kernels.latent.token_groups import group_chunks
from tandem.engine.kernels.latent.triton_index import index_store
from tandem.engine.kernels.latent.triton_store import latent_store
from tandem.engine.kernels.layers import IndexQueries, LatentLayer

_ABSORBED_ROWS = 8
"""Factor on `absorbed_tokens`: absorbed attention computes at most this multiple of chunk tokens in a step.

The partial results of more tokens would take hundreds of megabytes.
"""


class LatentKernels:
    """The latent attention of one model's layers, owned by `CudaKernels`.

    The only state is the plan of the current step, which is kept for each thread.
    """

    def __init__(
        self,
        shapes: Iterable[LatentShape],
        sparse: Iterable[LatentShape],
        device: torch.device,
        dtype: torch.dtype,
        pdl: bool,
        blocks: Future[BlockAttention],
    ) -> None:
        """Prepare the layers of `shapes`, and those of the shapes `sparse`, which attend to chosen tokens.

        `blocks`, the attention of expanded latents, may not be compiled yet.
        """
        self._pdl = pdl
        self._blocks = blocks
        self._shapes = tuple(shapes)
        self._single = {shape: AbsorbedAttention(shape, 1, device, dtype, pdl) for shape in self._shapes}
        self._chunks = {
            shape: AbsorbedAttention(shape, group_tokens(shape), device, dtype, pdl) for shape in self._shapes
        }
        self._sparse = {
            shape: SparseAttention(shape, device, dtype, pdl, _ABSORBED_ROWS * absorbed_tokens(shape))
            for shape in sparse
        }
        self._begun = threading.local()

    @cached_property
    def _prompts(self) -> dict[LatentShape, ExpandedAttention]:
        attention = self._blocks.result()
        return {shape: ExpandedAttention(shape, attention, self._pdl) for shape in self._shapes}

    @property
    def capturable_tokens(self) -> int | None:
        """The largest number of prompt tokens in a step that a CUDA graph may contain; None without latent attention.

        A graph of longer prompts would launch kernels for each block of the longest possible context, even if the rows
        have shorter ones.
        """
        return min(map(absorbed_tokens, (*self._shapes, *self._sparse)), default=None)

    def begin_step(self, cache: KvCache, layout: StepLayout, single: int) -> None:
        """Plan a step. Called once before a step's first layer; the first `single` rows have one token each."""
        if self._sparse and not layout.group:  # the rows are those of all groups
            self._begun.rows = rows_of(layout)
        for shape in self._shapes:
            held = latents_of(cache)
            if single:
                self._single[shape].begin_step(held, layout.page_table[:single], layout.context_lens[:single])
            if single == len(layout.context_lens):
                continue
            if _is_absorbed(shape, layout, single):
                groups = group_chunks(layout, single, group_tokens(shape))
                self._chunks[shape].begin_step(held, layout.page_table, groups.contexts, groups)
            else:
                self._prompts[shape].begin_step(layout, single)

    def store(self, q: Tensor, latents: Tensor, layer: LatentLayer, cache: LatentCache, layout: StepLayout) -> Tensor:
        """Apply norm and rotary embedding and store the latents, in one launch; see `Kernels.latent_store`."""
        return latent_store(q, latents, layer, cache, layout, pdl=self._pdl)

    def index_store(
        self, queries: Tensor, keys: Tensor, layer: LatentLayer, cache: Tensor, layout: StepLayout
    ) -> Tensor:
        """Store index keys and rotate index queries, in one launch; see `Kernels.index_store`."""
        return index_store(queries, keys, layer, cache, layout, pdl=self._pdl)

    def choose(self, index: IndexQueries, layer: LatentLayer, cache: Tensor, layout: StepLayout) -> Tensor:
        """Compute `Kernels.choose_tokens`."""
        return self._sparse[layer.shape].choose(index, self._begun.rows, layer, cache, layout)

    def attend(self, q: Tensor, chosen: Tensor, layer: LatentLayer, cache: Tensor, layout: StepLayout) -> Tensor:
        """Compute `Kernels.sparse_attention`."""
        return self._sparse[layer.shape].attend(q, chosen, self._begun.rows, layer, cache, layout)

    def attention(self, q: Tensor, layer: LatentLayer, cache: LatentCache, layout: StepLayout, single: int) -> Tensor:
        """Compute `Kernels.latent_attention` for a step that began with the same number of `single` rows."""
        rows, shape = len(layout.context_lens), layer.shape
        if single == rows or _is_absorbed(shape, layout, single):
            out = q.new_empty(len(q), shape.heads * shape.v_dim)
            if single < rows:
                self._chunks[shape](q[single:], layer.kv_up, cache, layer.index, out[single:])
        else:
            out = self._prompts[shape](q, layer.kv_up, cache, layer.index, layout, single).flatten(1)
        if single:
            self._single[shape](q[:single], layer.kv_up, cache, layer.index, out[:single])
        return out


def _is_absorbed(shape: LatentShape, layout: StepLayout, single: int) -> bool:
    """Return True if the rows from `single` on are short enough, and few enough, for absorbed attention."""
    most = absorbed_tokens(shape)
    return layout.max_row_tokens <= most and len(layout.positions) - single <= _ABSORBED_ROWS * most
