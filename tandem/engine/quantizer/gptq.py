"""GPTQ (Frantar et al., arXiv:2210.17323): columns are rounded one by one, and later columns compensate the error.

With 2:4 sparsity, the columns also compensate the error of weights that become zero (SparseGPT, Frantar and Alistarh,
arXiv:2301.00774): of each four columns of a row the two are pruned whose removal adds the least error to the outputs.

Columns are rounded in descending order of their inputs' power (activation order), but groups are static: a column
belongs to the group of its position, and all scales are computed before the first column is rounded. So the checkpoint
does not have to store an order of columns.
"""

import torch
from torch import Tensor

from tandem.engine.quantizer.calibration import InputStatistics
from tandem.engine.quantizer.codes import QuantizedWeight, fit_grid
from tandem.engine.quantizer.scheme import OutputScheme
from tandem.engine.quantizer.sparsity import FOUR, least_two, order_of_fours

DAMPING = 0.01
"""The fraction of the Gram matrix's mean diagonal element that is added to its diagonal, as in the paper."""
_BLOCK = 128
"""The number of columns in a block, after which one matrix product applies the error to all later columns.

It is a multiple of 4, so that no four of 2:4 sparsity is divided.
"""


def gptq(
    weight: Tensor,
    inputs: InputStatistics,
    scheme: OutputScheme,
    group: int | None,
    scale_dtype: torch.dtype,
    *,
    sparse: bool = False,
) -> QuantizedWeight:
    """Return the codes of `weight` [N, K] float32 for inputs with these statistics; `group` is as in `fit_grid`.

    With `sparse` the weight becomes 2:4 sparse; K is a multiple of 4 then.
    """
    grid = fit_grid(weight, scheme, group, scale_dtype)
    power = inputs.gram.diagonal()
    order = order_of_fours(power) if sparse else power.argsort(descending=True)
    upper = _inverse_root(inputs.gram[order][:, order])
    columns = order.tolist()
    rest, codes = weight[:, order].clone(), torch.empty_like(weight)
    for first in range(0, len(columns), _BLOCK):
        last = min(first + _BLOCK, len(columns))
        block, root = rest[:, first:last], upper[first:last, first:last]
        errors, pruned = torch.empty_like(block), torch.zeros_like(block, dtype=torch.bool)
        for index in range(last - first):
            column = columns[first + index]
            if sparse and index % FOUR == 0:
                four = slice(index, index + FOUR)
                pruned[:, four] = least_two((block[:, four] / root.diagonal()[four]).square())
            code = grid.codes(block[:, index, None].masked_fill(pruned[:, index, None], 0.0), column)
            codes[:, column] = code[:, 0]
            errors[:, index] = (block[:, index] - grid.values(code, column)[:, 0]) / root[index, index]
            block[:, index + 1 :] -= errors[:, index, None] * root[index, index + 1 :]
        rest[:, last:] -= errors @ upper[first:last, last:]
    return QuantizedWeight(codes, grid)


def _inverse_root(gram: Tensor) -> Tensor:
    """Return the upper Cholesky factor [K, K] float32 of the inverse of the damped Gram matrix."""
    damped = gram.double()
    diagonal = damped.diagonal()
    diagonal += DAMPING * diagonal.mean()
    # Inputs that are zero for all tokens: their columns are rounded to nearest.
    diagonal[diagonal == 0] = 1.0
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    root: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return root.float()
