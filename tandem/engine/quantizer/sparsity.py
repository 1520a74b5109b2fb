"""2:4 sparsity: two of each four consecutive weights of a row are zero, as the sparse products of GPUs require."""

import torch
from torch import Tensor

from tandem.protocol.errors import InvalidArgument

SPARSITY = "2:4"
"""The only pattern of zeros that is supported."""
FOUR = 4


def check_divisible(inputs: set[int]) -> None:
    """Raise InvalidArgument if the inputs of a linear layer cannot be divided into fours."""
    if ragged := sorted(width for width in inputs if width % FOUR):
        raise InvalidArgument("sparsity", f"the model's products have {ragged[0]} inputs, no multiple of {FOUR}.")


def prune_by_magnitude(weight: Tensor) -> Tensor:
    """Return a copy of weight [N, K] in which the two smallest magnitudes of each four columns are zero."""
    return weight.masked_fill(least_two(weight.abs()), 0.0)


def least_two(scores: Tensor) -> Tensor:
    """Return a mask of scores [N, K] that is True for the two lowest of each four columns; K is a multiple of 4."""
    fours = torch.unflatten(scores, -1, (-1, FOUR))
    lowest = fours.topk(FOUR // 2, dim=-1, largest=False).indices
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, lowest, value=True).flatten(-2)


def order_of_fours(power: Tensor) -> Tensor:
    """Return column numbers [K] in descending order of their fours' total power [K]; each four stays together."""
    fours = power.view(-1, FOUR).sum(1).argsort(descending=True)
    return (FOUR * fours[:, None] + torch.arange(FOUR, device=power.device)).flatten()
