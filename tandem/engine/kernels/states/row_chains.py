"""Steps that verify draft tokens, as state layers compute them: rejected draft tokens must leave no trace in a state.

A request's newest token and its draft tokens are one row of several tokens. Its state is read, but the state after the
row is written to the last page, which no request has. When the accepted draft tokens are known, the rows are computed
once more up to the last accepted one, from the same inputs, and their states are written.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import StateCache


def verifying(layout: StepLayout, cache: StateCache) -> StepLayout:
    """Return the layout of a step's rows in the order of `RowChains`: a row for each request.

    Requests without draft tokens keep the state after their only token.
    """
    counts, pages = _chains(layout)
    scratch = len(cache.inputs) - 1
    pages[:, 1].masked_fill_(counts > 1, scratch)
    assert layout.chains is not None
    return _rows(layout, layout.chains.starts, pages)


def accepting(layout: StepLayout, accepted: Tensor) -> StepLayout:
    """Return the layout that writes the states after the first accepted[c] draft tokens of each request c.

    layout          the layout of the step that verified them
    accepted [n]    int32; only the entries of requests with draft tokens count

    The tokens of a request are two rows: the tokens up to the last accepted one, and the others, which are padding.
    """
    counts, pages = _chains(layout)
    assert layout.chains is not None
    starts, several = layout.chains.starts, counts > 1
    ends = torch.where(several, starts[:-1] + accepted + 1, starts[:-1])
    pages.masked_fill_(~several[:, None], -1)
    row_starts = torch.cat([torch.stack([starts[:-1], ends], 1).flatten(), starts[-1:]])
    return _rows(layout, row_starts, torch.stack([pages, torch.full_like(pages, -1)], 1).flatten(0, 1))


def _chains(layout: StepLayout) -> tuple[Tensor, Tensor]:
    """Return the number of rows of each request [n], and the pages [n, 2] of its first row; -1 if it has none."""
    assert layout.chains is not None
    assert layout.state_pages is not None
    starts, order = layout.chains.starts, layout.chains.order
    counts = starts.diff()
    first = order[starts[:-1].clamp(max=len(order) - 1)]
    return counts, layout.state_pages[first].masked_fill_(counts[:, None] == 0, -1)


def _rows(layout: StepLayout, row_starts: Tensor, pages: Tensor) -> StepLayout:
    assert layout.chains is not None
    return replace(
        layout,
        row_starts=row_starts,
        context_lens=row_starts.diff(),
        max_row_tokens=layout.chains.rows,
        single_rows=0,
        state_pages=pages,
    )
