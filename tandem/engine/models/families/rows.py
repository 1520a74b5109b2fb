"""Rows of weights that a checkpoint stores in another order than the kernels read them."""

from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.models.parameters import Place


def permute_rope_rows(place: Place, heads: int, dims: int, rotated: slice) -> Place:
    """Returns a place whose rotated rows are stored in neighbouring pairs, as kernels have pairs half a width apart.

    The rows belong to `heads` heads of `dims` rows each, of which `rotated` are rotated.
    """

    def reorder(stored: Tensor) -> Tensor:
        rows = stored.reshape(heads, dims, -1).clone()
        pairs = rows[:, rotated]
        rows[:, rotated] = torch.cat((pairs[:, 0::2], pairs[:, 1::2]), dim=1)
        return rows.view(stored.shape)

    return replace(place, transform=reorder)
