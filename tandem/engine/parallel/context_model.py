"""Context parallelism: each rank has the whole model, and the tokens of a prefill step are divided among the ranks.

A step of T tokens is cut into 2 · N slices of consecutive tokens. Rank r computes slices r and 2 · N - 1 - r, so that
all ranks compute the same number of query-key pairs of a causal prompt. The keys and values of each layer are gathered
into the cache of every rank; each rank then attends with its own queries to its own cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from tandem.engine.config.sharding import Rank
from tandem.engine.kernels.base import DeferredTokens, StepLayout, is_cpu
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartLayout(StepLayout):
    """The layout of this rank's tokens of a step in one group of layers, and how their KV is exchanged.

    tokens           [n] int64: the indices in the step of the tokens of this rank
    sent             two int64 tensors [most]: the page, and the place in it, of the KV of each of them; `most` is the
                     number of tokens of the rank with the most, and a rank with fewer repeats its last token
    received         two int64 tensors [N · most]: those of the tokens of all ranks, in the order of the ranks
    """

    tokens: Tensor
    sent: tuple[Tensor, Tensor]
    received: tuple[Tensor, Tensor]


def _divided(
    layouts: Sequence[StepLayout], caches: Sequence[GroupCache], rank: Rank, starts: Sequence[int]
) -> tuple[_PartLayout, ...]:
    """Return the layouts of this rank's tokens, one for each group of layers, without waiting for the device."""
    parts = [row_parts(starts, replace(rank, number=number)) for number in range(rank.count)]
    indices = [np.concatenate([np.arange(part.start, part.end) for part in own]) for own in parts]
    most = max(map(len, indices))
    own = parts[rank.number]
    lengths = [part.end - part.start for part in own]
    tokens, stored, rows, later, row_starts = _on_device(
        layouts[0].slots.device,
        indices[rank.number],
        np.concatenate([np.pad(numbers, (0, most - len(numbers)), "edge") for numbers in indices]),
        np.array([part.row for part in own]),
        np.array([starts[part.row + 1] - part.end for part in own]),
        np.cumsum([0, *lengths]),
    )
    # The tokens of the step that come before a part are in the cache when its queries attend.
    earlier = max(part.start - starts[part.row] for part in own)
    first = layouts[0]
    positions, row_starts, context_lens = first.positions[tokens], row_starts.int(), first.context_lens[rows] - later
    context_lens, adapters = context_lens.int(), None if first.adapters is None else first.adapters[tokens]
    divided = []
    for layout, cache in zip(layouts, caches, strict=True):
        page_tokens = kv_of(cache).shape[4]
        received = layout.slots[stored]
        sent = received[rank.number * most : (rank.number + 1) * most]
        divided.append(
            _PartLayout(
                positions=positions,
                slots=layout.slots[tokens],
                row_starts=row_starts,
                context_lens=context_lens,
                page_table=layout.page_table[rows],
                max_row_tokens=max(lengths),
                max_context=layout.max_context,
                single_rows=lengths.count(1),
                max_cached=None if layout.max_cached is None else layout.max_cached + earlier,
                group=layout.group,
                adapters=adapters,
                tokens=tokens,
                sent=(sent // page_tokens, sent % page_tokens),
                received=(received // page_tokens, received % page_tokens),
            )
        )
    return tuple(divided)


def _on_device(device: torch.device, *arrays: np.ndarray) -> Sequence[Tensor]:
    """Return int64 tensors of these arrays on `device`, by one copy, which is only launched."""
    packed = torch.from_numpy(np.concatenate(arrays))
    # PyTorch's allocator of pinned memory reuses it only after the device has read it.
    packed = packed if is_cpu(device) else packed.pin_memory()
    return packed.to(device, non_blocking=True).split_with_sizes([len(array) for array in arrays])


class ContextModel(GroupModel):
    """A whole decoder model on each rank of a group, which divides the tokens of prefill steps.

    Every rank computes as a whole the steps without a prompt chunk, those of fewer tokens than two for each rank, and
    those of CUDA graphs, whose rows the host does not know. The first rank embeds the tokens and gets the logits; the
    result of `forward` on other ranks has no meaning.
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
        starts, count = layouts[0].host_starts, len(token_ids)
        if starts is None or layouts[0].decode_only or count < 2 * self._rank.count:
            return super().forward(token_ids, layouts, caches, drawn, feed, scoring=scoring)
        own = _divided(layouts, caches, self._rank, starts.tolist())
        # Every rank computes one row for each drawn token, also for those of other ranks, whose result is zeroed. So
        # the host does not have to know which rank has which.
        places = own[0].tokens.new_full((count,), -1)
        places[own[0].tokens] = torch.arange(len(own[0].tokens), device=places.device)
        places = places if drawn is None else places[drawn]
        hidden = self._drawn_states(token_ids, own, caches, places.clamp(min=0), feed)
        if hidden is None:
            return None
        hidden.masked_fill_(places.unsqueeze(1) < 0, 0)  # a new tensor, of the rows in `places`
        self._collectives.all_reduce(hidden)
        return self._step_logits(hidden, scoring)

    def _begin_step(
        self,
        token_ids: Tensor,
        layouts: Sequence[StepLayout],
        caches: Sequence[GroupCache],
        feed: DeferredTokens | None,
    ) -> Tensor:
        """Return the hidden states of this rank's tokens; the first rank embeds those of all ranks."""
        hidden, layout = super()._begin_step(token_ids, layouts, caches, feed), layouts[0]
        return hidden[layout.tokens] if isinstance(layout, _PartLayout) else hidden

    def _store(self, layer: DecoderLayer, hidden: Tensor, layout: StepLayout, cache: GroupCache) -> Queries:
        """Store the KV of this rank's tokens, and copy that of all ranks into the cache of every rank."""
        queries = super()._store(layer, hidden, layout, cache)
        if not isinstance(layout, _PartLayout):
            return queries
        assert not isinstance(layer.attention, StateBlock)
        if isinstance(layer.attention, AttentionBlock) and not layer.attention.stores_kv:
            return queries
        number = layer.attention.cache_index
        for tensor in tensors_of(kv_of(cache)):
            # [most, parts, heads, ...]
            values = tensor[layout.sent[0], number, :, :, layout.sent[1]].contiguous()
            gathered = self._collectives.all_gather(values).flatten(0, 1)
            tensor[layout.received[0], number, :, :, layout.received[1]] = gathered
        return queries
