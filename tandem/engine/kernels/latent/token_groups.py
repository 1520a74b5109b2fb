"""Divides the tokens of a step's prompt chunks into groups, on the device."""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.kernels.base import StepLayout


class TokenGroups(NamedTuple):
    """Groups of tokens of a step's prompt chunks; each group has consecutive tokens of one row.

    Tensors are int32 on the device; tokens are counted from the first token of the chunks.
    """

    table: Tensor
    """[groups, 3]: the row in the step's page table, the group's first token, its number of tokens."""
    of_tokens: Tensor
    """[T] the group of each token; -1 = the token is in no row."""
    contexts: Tensor
    """[groups] the number of positions up to and including the group's last token; 0 = the entry is unused."""


def group_chunks(layout: StepLayout, first_row: int, tokens: int) -> TokenGroups:
    """Divide the rows from `first_row` on into groups of up to `tokens` tokens; every row before has one token.

    The table has enough entries for any lengths of these rows, so that no shape depends on data of the device.
    """
    starts = layout.row_starts[first_row:].long() - first_row
    begins, ends = starts[:-1], starts[1:]
    rows, total = len(begins), len(layout.positions) - first_row
    device = starts.device
    last_groups = ((ends - begins + tokens - 1) // tokens).cumsum(0)
    first_groups = torch.nn.functional.pad(last_groups[:-1], (1, 0))

    # Each row has at most one group that is not full, so this number of groups always suffices.
    number = torch.arange(total // tokens + rows, device=device)
    row = torch.searchsorted(last_groups, number, right=True)
    exists = row < rows
    row = row.clamp(max=rows - 1)
    first = begins[row] + (number - first_groups[row]) * tokens
    held = torch.minimum(ends[row] - first, torch.full_like(first, tokens))
    context = layout.context_lens[first_row:][row] - (ends[row] - first - held)
    table = torch.stack((row + first_row, first, held), dim=1) * exists.unsqueeze(1)

    token = torch.arange(total, device=device)
    of = torch.searchsorted(ends.contiguous(), token, right=True)
    inside = of < rows
    of = of.clamp(max=rows - 1)
    group = torch.where(inside, first_groups[of] + (token - begins[of]) // tokens, -1)
    return TokenGroups(table.int(), group.int(), (context * exists).int())
