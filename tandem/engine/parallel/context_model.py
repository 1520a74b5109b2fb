"""Context parallelism: each rank has the whole model, and the tokens of a prefill step are divided among the ranks.

A step of T tokens is cut into 2 · N slices of consecutive tokens. Rank r computes slices r and 2 · N - 1 - r, so that
all ranks compute the same number of query-key pairs of a causal prompt. The keys and values of each layer are gathered
into the cache of every rank; each rank then attends with its own queries to its own cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from tandem.engine.config.sharding import Rank
from tandem.engine.kernels.base import DeferredTokens, StepLayout
from tandem.engine.kernels.kv_cache import GroupCache, kv_of, tensors_of
from tandem.engine.models.blocks import AttentionBlock, Queries, StateBlock
from tandem.engine.models.layers import DecoderLayer
from tandem.engine.parallel.group_model import GroupModel
from tandem.engine.steps.prompt_scoring import StepPieces


@dataclass(frozen=True, slots=True)
class RowPart:
    """The tokens `start` .. `end` - 1 of a step, all of row `row`."""

    row: int
    start: int
    end: int


def row_parts(row_starts: Sequence[int], rank: Rank) -> list[RowPart]:
    """Return the parts of rows that `rank` computes, those of one token first, as `StepLayout.single_rows` says.

    The step must have at least 2 · `rank.count` tokens; each rank then has two or more.
    """
    tokens, slices = row_starts[-1], 2 * rank.count
    parts = []
    for number in (rank.number, slices - 1 - rank.number):
        begin, stop = number * tokens // slices, (number + 1) * tokens // slices
        for row, (first, last) in enumerate(pairwise(row_starts)):
            if max(first, begin) < min(last, stop):
                parts.append(RowPart(row, max(first, begin), min(last, stop)))
    return sorted(parts, key=lambda part: part.end - part.start > 1)


@dataclass(frozen=True, slots=True)
class _TokenDivision:
    """The division of one step's tokens among the ranks.

    tokens   [n] int64: the indices in the step of the tokens of this rank
    layouts  the layouts of these tokens, one for each group of layers
    stored   [N · most] int64: the indices of the tokens of all ranks in the order in which their KV is gathered; the
             last token of a rank with fewer than `most` tokens is repeated
    most     the number of tokens of the rank with the most
    """

    tokens: Tensor
    layouts: tuple[StepLayout, ...]
    stored: Tensor
    most: int

    @classmethod
    def of(cls, layouts: Sequence[StepLayout], rank: Rank) -> "_TokenDivision":
        """Divide a step. On a GPU this waits for the copy of the step to the device."""
        device = layouts[0].slots.device
        row_starts = layouts[0].row_starts.tolist()
        parts = [row_parts(row_starts, replace(rank, number=number)) for number in range(rank.count)]
        indices = [[token for part in own for token in range(part.start, part.end)] for own in parts]
        most = max(map(len, indices))
        stored = [token for own in indices for token in own + own[-1:] * (most - len(own))]
        tokens = torch.tensor(indices[rank.number], device=device)
        own = tuple(_part_of(layout, tokens, parts[rank.number], row_starts) for layout in layouts)
        return cls(tokens, own, torch.tensor(stored, device=device), most)

    def places(self, count: int) -> Tensor:
        """Return for each of the step's `count` tokens its index in `tokens`, or -1 if another rank computes it."""
        places = self.tokens.new_full((count,), -1)
        places[self.tokens] = torch.arange(len(self.tokens), device=places.device)
        return places


def _part_of(layout: StepLayout, tokens: Tensor, parts: Sequence[RowPart], row_starts: Sequence[int]) -> StepLayout:
    """Return the layout of the rows `parts`, whose tokens have the indices `tokens`."""
    device, lengths = tokens.device, [part.end - part.start for part in parts]
    rows = torch.tensor([part.row for part in parts], device=device)
    later = torch.tensor([row_starts[part.row + 1] - part.end for part in parts], device=device, dtype=torch.int32)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    earlier = max(part.start - row_starts[part.row] for part in parts)
    return replace(
        layout,
        positions=layout.positions[tokens],
        slots=layout.slots[tokens],
        row_starts=torch.tensor(starts, device=device, dtype=torch.int32),
        context_lens=layout.context_lens[rows] - later,
        page_table=layout.page_table[rows],
        max_row_tokens=max(lengths),
        single_rows=lengths.count(1),
        # The tokens of the step that come before a part are in the cache when its queries attend.
        max_cached=None if layout.max_cached is None else layout.max_cached + earlier,
        adapters=None if layout.adapters is None else layout.adapters[tokens],
    )


class ContextModel(GroupModel):
    """A whole decoder model on each rank of a group, which divides the tokens of prefill steps.

    Steps without a prompt chunk, and those of fewer tokens than two for each rank, are computed by every rank as a
    whole. The first rank embeds the tokens and gets the logits; the result of `forward` on other ranks has no meaning.
    """

    def forward(
        self,
        token_ids: Tensor,
        layouts: Sequence[StepLayout],
        caches: Sequence[GroupCache],
        drawn: Tensor | None,
        feed: DeferredTokens | None = None,
        *,
        scoring: StepPieces | None = None,
    ) -> Tensor | None:
        """Run this rank's part of a step. It ends on each rank only after the KV of all tokens is in its cache."""
        if layouts[0].decode_only or len(token_ids) < 2 * self._rank.count:
            return super().forward(token_ids, layouts, caches, drawn, feed, scoring=scoring)
        division = _TokenDivision.of(layouts, self._rank)
        own = division.layouts
        hidden = self._begin_step(token_ids, own, caches, feed)[division.tokens]
        for layer in self._layers[:-1]:
            q = self._store(layer, hidden, layouts, division, caches)
            mixed = layer.attention.attend(q, own[layer.group], caches[layer.group])
            self._finish(layer, mixed, hidden, own[0].slots)
        last = self._layers[-1]
        q = self._store(last, hidden, layouts, division, caches)
        if drawn is not None and len(drawn) == 0:
            return None
        mixed = last.attention.attend(q, own[last.group], caches[last.group])
        drawn = torch.arange(len(token_ids), device=token_ids.device) if drawn is None else drawn
        # Every rank computes one row for each drawn token, also for those of other ranks, whose result is zeroed. So
        # the host does not have to know which rank has which.
        places = division.places(len(token_ids))[drawn]
        rows = places.clamp(min=0)
        if self._updates is not None:
            self._updates.keep_tokens(rows)
        hidden, mixed, slots = hidden[rows], mixed[rows], own[0].slots[rows]
        self._finish(last, mixed, hidden, slots)
        hidden = torch.where(places.unsqueeze(1) < 0, 0, hidden)
        self._collectives.all_reduce(hidden)
        return self._logits(hidden) if scoring is None else scoring.logits(hidden, self._logits)

    def _store(
        self,
        layer: DecoderLayer,
        hidden: Tensor,
        layouts: Sequence[StepLayout],
        division: _TokenDivision,
        caches: Sequence[GroupCache],
    ) -> Queries:
        """Store the KV of this rank's tokens, and copy that of all ranks into the cache of every rank.

        `layouts` are those of the whole step. Returns the queries of this rank's tokens.
        """
        block, group = layer.attention, layer.group
        assert not isinstance(block, StateBlock)
        own, cache = division.layouts[group], kv_of(caches[group])
        queries = block.store(hidden, own, cache)
        if isinstance(block, AttentionBlock) and not block.stores_kv:
            return queries
        missing = division.most - len(own.slots)
        sent = torch.cat((own.slots, own.slots[-1:].expand(missing)))
        received = layouts[group].slots[division.stored]
        for tensor in tensors_of(cache):
            page_tokens = tensor.shape[4]
            # [n, parts, heads, ...]
            values = tensor[sent // page_tokens, block.cache_index, :, :, sent % page_tokens].contiguous()
            gathered = self._collectives.all_gather(values).flatten(0, 1)
            tensor[received // page_tokens, block.cache_index, :, :, received % page_tokens] = gathered
        return queries
