"""AWQ (`version: gemm`): 4-bit codes with zero points. The columns of the stored matrices are the outputs.

qweight  I32 [K, N / 8]; the codes of a word belong to outputs 0, 2, 4, 6, 1, 3, 5, 7 of its eight, lowest bits first
qzeros   I32 [K / g, N / 8], in the same order
scales   [K / g, N]

weight = (code - zero) · scale.
"""

from collections.abc import Mapping

from torch import Tensor

from tandem.engine.config.quantization import WeightScheme
from tandem.engine.weights.quantized.format import (
    FLOATS,
    WORDS,
    Format,
    GroupedCodes,
    Shape,
    StoredTensor,
    group_count,
    integers,
    nibbles,
)

_WORD = 8
_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""The position of each output's code in a word, for the eight outputs of the word."""


def _tensors(scheme: WeightScheme, rows: int, columns: int) -> tuple[StoredTensor, ...]:
    groups = group_count(scheme, columns)
    return (
        StoredTensor("qweight", ((columns, -(-rows // _WORD)),), WORDS),
        StoredTensor("qzeros", ((groups, -(-rows // _WORD)),), WORDS),
        StoredTensor("scales", ((groups, rows),), FLOATS),
    )


def _read(scheme: WeightScheme, tensors: Mapping[str, Tensor], shape: Shape) -> GroupedCodes:
    rows = shape[0]
    codes, zeros = (_in_order(tensors[name])[:, :rows].t() for name in ("qweight", "qzeros"))
    return integers(scheme, codes.contiguous(), tensors["scales"].t().contiguous(), zeros)


def _in_order(words: Tensor) -> Tensor:
    """Return the codes [K, N], in output order, of words [K, N / 8]."""
    codes = nibbles(words)
    return codes.view(len(codes), -1, _WORD)[..., _ORDER].flatten(-2)


FORMAT = Format(_tensors, _read)
