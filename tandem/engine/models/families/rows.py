"""Reorders weight rows that checkpoints store in another order than kernels need."""

from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.models.parameters import ParameterSlot


def permute_rope_rows(slot: ParameterSlot, heads: int, dims: int, rotated: slice) -> ParameterSlot:
    """Return a slot that reorders the rotated rows of a weight as the kernels need them.

    The checkpoint stores the two rows of each rotated pair next to each other; the kernels need them half a width
    apart. The weight has `heads` heads of `dims` rows each; in each head, the rows `rotated` are reordered.
    """

    def reorder(stored: Tensor) -> Tensor:
        rows = stored.reshape(heads, dims, -1).clone()
        pairs = rows[:, rotated]
        rows[:, rotated] = torch.cat((pairs[:, 0::2], pairs[:, 1::2]), dim=1)
        return rows.view(stored.shape)

    return replace(slot, transform=reorder)
