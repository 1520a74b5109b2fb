"""Reordering of weight rows that checkpoints store in another order than the kernels read them."""

from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.models.parameters import ParameterSlot


def permute_rope_rows(slot: ParameterSlot, heads: int, dims: int, rotated: slice) -> ParameterSlot:
    """Return a slot that reorders rotated rows from neighbouring pairs into pairs half a width apart, as kernels need.

    The rows belong to `heads` heads of `dims` rows each; in each head, the rows `rotated` are reordered.
    """

    def reorder(stored: Tensor) -> Tensor:
        rows = stored.reshape(heads, dims, -1).clone()
        pairs = rows[:, rotated]
        rows[:, rotated] = torch.cat((pairs[:, 0::2], pairs[:, 1::2]), dim=1)
        return rows.view(stored.shape)

    return replace(slot, transform=reorder)
