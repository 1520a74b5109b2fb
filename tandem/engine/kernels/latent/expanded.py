"""Expanded attention of prompts, for which keys and values of all heads are computed from the latents, block by block.

First, a step's own tokens attend to one another. Then the tokens of rows that had tokens in the cache before the step
attend to blocks of these positions, without a mask, because each token of the row sees all of them. The results are
merged by the logarithms of the sums of weights, as in Flash-Decoding.
"""

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.config.attention import LatentShape
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import LatentCache
from tandem.engine.kernels.latent.block_attention import BlockAttention
from tandem.engine.kernels.latent.triton_expand import TAIL, expand, merge_block

BLOCK_TOKENS = 8192
"""Maximum number of cached positions whose keys and values exist at a time: 84 MB for 16 heads of 192 and 128 dims."""
LEAST_TOKENS = 512
"""Minimum number of cached positions of a row per block: with fewer, merging would take longer than attention."""


class _Block(NamedTuple):
    """A range of positions of each of R rows; tensors are int32 on the device."""

    starts: Tensor
    """[R + 1] the index of each row's first key among the packed keys; `TAIL` zeros follow each row's keys."""
    lengths: Tensor
    """[R], the number of positions of each row."""
    first_positions: Tensor
    """[R], the first position of each row's range."""
    longest: int
    """Upper bound of the lengths."""
    tokens: int
    """Upper bound of the number of packed tokens."""


class _Step(NamedTuple):
    """The blocks of keys of a step: `own` has the step's own tokens, `cached` the positions cached before the step.

    With each cached block comes the number of the block's keys that each token sees: [T] int32.
    """

    own: _Block
    cached: list[tuple[_Block, Tensor]]


class ExpandedAttention:
    """Expanded attention of a step's rows from `first_row` on.

    Call `begin_step` once per step, then the object once per layer.
    """

    def __init__(self, shape: LatentShape, attention: BlockAttention, pdl: bool) -> None:
        self._shape = shape
        self._attention = attention
        self._pdl = pdl
        self._begun = threading.local()

    def begin_step(self, layout: StepLayout, first_row: int) -> None:
        """Lay out the blocks of a step. Called once before the calls of a step, by the same thread."""
        starts = layout.row_starts[first_row:]
        lengths = starts[1:] - starts[:-1]
        cached = layout.context_lens[first_row:] - lengths
        own = _pack(lengths, cached, layout.max_row_tokens, len(layout.positions) - first_row)
        rows = len(lengths)
        most = layout.max_context if layout.max_cached is None else layout.max_cached
        at_once = max(LEAST_TOKENS, BLOCK_TOKENS // rows)
        row = _rows_of_tokens(starts, len(layout.positions)) if most else starts
        # Only the device knows how many positions each row has in the cache: blocks cover the host's bound `most`, and
        # rows with shorter contexts have empty ranges in the later blocks.
        blocks: list[tuple[_Block, Tensor]] = []
        for first in range(0, most, at_once):
            here, longest = (cached - first).clamp(0, at_once), min(at_once, most - first)
            block = _pack(here, torch.full_like(here, first), longest, longest * rows)
            blocks.append((block, torch.where(row >= 0, here[row.clamp(min=0)], 0)))
        self._begun.step = _Step(own, blocks)

    def __call__(
        self, q: Tensor, kv_up: Tensor, cache: LatentCache, layer: int, layout: StepLayout, first_row: int
    ) -> Tensor:
        """Compute attention of the whole step's q [T, heads, nope + rope] → [T, heads, v_dim].

        The result of the rows before `first_row` is undefined.
        """
        step: _Step = self._begun.step
        starts, longest = layout.row_starts[first_row:], layout.max_row_tokens
        table = layout.page_table[first_row:]

        def attend(block: _Block, *, causal: bool) -> tuple[Tensor, Tensor]:
            keys, values = self._expand(block, kv_up, cache, layer, table)
            return self._attention(
                q,
                keys,
                values,
                starts,
                block.starts,
                block.lengths,
                longest,
                block.longest,
                self._shape.scale,
                causal=causal,
            )

        out, lse = attend(step.own, causal=True)
        if not step.cached:
            return out
        mixed = out.float()
        for block, seen in step.cached:
            merge_block(mixed, lse, *attend(block, causal=False), seen, pdl=self._pdl)
        return mixed.to(out.dtype)

    def _expand(
        self, block: _Block, kv_up: Tensor, cache: LatentCache, layer: int, page_table: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the keys and values of a block, each [tokens, heads, any]."""
        shape = self._shape
        both = torch.empty(block.tokens, shape.heads, shape.query + shape.v_dim, dtype=kv_up.dtype, device=kv_up.device)
        expand(
            cache, layer, kv_up, page_table, block.starts, block.lengths, block.first_positions, block.longest, both,
            shape, pdl=self._pdl,
        )  # fmt: skip
        return both[..., : shape.query], both[..., shape.query :]


def _pack(lengths: Tensor, first_positions: Tensor, longest: int, tokens: int) -> _Block:
    """Return the block of a range of positions of each row; `tokens` is an upper bound of Σ `lengths` ([R] int32)."""
    starts = torch.nn.functional.pad((lengths + TAIL).cumsum(0, dtype=torch.int32), (1, 0))
    return _Block(starts, lengths, first_positions, longest, tokens + len(lengths) * TAIL)


def _rows_of_tokens(starts: Tensor, tokens: int) -> Tensor:
    """Return the row of each of the step's tokens [T], -1 for tokens in no row; starts [R + 1]."""
    token = torch.arange(tokens, dtype=starts.dtype, device=starts.device)
    row = torch.searchsorted(starts, token, right=True) - 1
    return torch.where(row < len(starts) - 1, row, -1)
