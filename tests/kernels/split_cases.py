"""Steps whose attention is split, as a graph holds them: places for more rows, tokens and windows than they need."""

from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.base import StepLayout

from .steps import Step


def windows_of(rows: list[tuple[int, int]], window: int, places: int) -> int:
    """Windows that `places` rows need room for, see `StepLayout.windows`."""
    cuts = [-(-context // window) for _, context in rows]
    return max(*cuts, sum(cuts) - places, 1)


def as_graph(step: Step, window: int, *, empty_rows: int = 0, tokens: int = 0, windows: int = 0) -> Step:
    """`step` with so many rows, tokens and windows more than it needs. Tokens of no row have position 0."""
    layout = step.layout
    count = len(layout.context_lens) + empty_rows
    padded = StepLayout(
        positions=_longer(layout.positions, tokens, 0),
        slots=_longer(layout.slots, tokens, -1),
        row_starts=_longer(layout.row_starts, empty_rows, int(layout.row_starts[-1])),
        context_lens=_longer(layout.context_lens, empty_rows, 0),
        page_table=_longer(layout.page_table, empty_rows, 0),
        max_row_tokens=layout.max_row_tokens + tokens,
        max_context=layout.max_context,
        windows=windows_of(list(step.rows), window, count) + windows,
    )
    return replace(step, layout=padded, q=_longer(step.q, tokens, float("nan")))


def _longer(values: Tensor, by: int, fill: float) -> Tensor:
    return torch.cat((values, torch.full((by, *values.shape[1:]), fill, dtype=values.dtype)))
