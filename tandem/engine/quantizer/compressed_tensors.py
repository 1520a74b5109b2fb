"""The tensors of compressed-tensors' formats that a quantized weight is written as."""

import torch
from torch import Tensor

from tandem.engine.quantizer.codes import QuantizedWeight


def stored_tensors(name: str, weight: QuantizedWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the tensors of the module whose weight [N, K] was called `name` (`….weight`).

    pack-quantized: `weight_packed` int32 [N, K / 8 or K / 4], `weight_scale`, `weight_shape` int64 [2] and, with zero
    points, `weight_zero_point` int32 [N / 8, groups]. int-quantized and float-quantized: `weight` and `weight_scale`.
    """
    grid, (rows, columns) = weight.grid, weight.codes.shape
    found = {f"{name}_scale": grid.scales.to(scale_dtype)}
    if not grid.scheme.packed:
        codes = weight.codes.to(torch.float8_e4m3fn if grid.scheme.kind == "float" else torch.int8)
        return found | {name: codes}
    bits = grid.scheme.bits
    found |= {
        f"{name}_packed": pack_words(weight.codes, bits),
        f"{name}_shape": torch.tensor([rows, columns], dtype=torch.int64),
    }
    if grid.zeros is not None:
        found[f"{name}_zero_point"] = pack_words(grid.zeros.T, bits).T
    return found


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Packs whole numbers [N, K] from -2^(bits - 1) on into words → [N, ceil(K · bits / 32)] int32.

    Each becomes its distance from the lowest one; the first of a word has its lowest bits, and a last word that is not
    full ends in zeros.
    """
    each = 32 // bits
    raised = codes.to(torch.int64) + 2 ** (bits - 1)
    raised = torch.nn.functional.pad(raised, (0, -codes.shape[1] % each)).view(len(codes), -1, each)
    words = (raised << torch.arange(0, 32, bits, device=codes.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
