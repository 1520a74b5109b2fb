"""GPTQ: codes of 4 or 8 bits. The columns of the stored matrices are the outputs.

qweight  I32 [K / c, N], c codes per word: inputs c·r to c·r + c - 1, lowest bits first
qzeros   I32 [G, N / c], outputs in order; format `gptq` stores zero - 1, `gptq_v2` the zero itself
scales   [G, N]
g_idx    I32 [K]: the group of each input; may be missing if columns are not scattered

weight = (code - zero) · scale. In a symmetric scheme every zero is the centre of the codes. Checkpoints of either
format have been published under the name of the other. In a symmetric scheme the stored zeros tell which format it is;
in an asymmetric scheme they do not.
"""

from collections.abc import Mapping

from torch import Tensor

from tandem.engine.config.quantization import Codes, WeightFormat, WeightScheme
from tandem.engine.kernels.packed_weight import CENTRE
from tandem.engine.weights.quantized.format import (
    BYTE_CENTRE,
    FLOATS,
    WORDS,
    Format,
    GroupedCodes,
    Shape,
    StoredTensor,
    checked_groups,
    codes_of,
    group_count,
    in_word,
    integers,
)
from tandem.protocol.errors import ModelError


def _tensors(scheme: WeightScheme, rows: int, columns: int) -> tuple[StoredTensor, ...]:
    groups, word = group_count(scheme, columns), in_word(scheme.codes)
    return (
        StoredTensor("qweight", ((-(-columns // word), rows),), WORDS),
        StoredTensor("qzeros", ((groups, -(-rows // word)),), WORDS),
        StoredTensor("scales", ((groups, rows),), FLOATS),
        StoredTensor("g_idx", ((columns,),), WORDS, required=scheme.scattered),
        # Old exports have a bias of zeros for each module, even if the model has no biases.
        StoredTensor("bias", ((rows,),), FLOATS, required=False),
    )


def _read(scheme: WeightScheme, tensors: Mapping[str, Tensor], shape: Shape) -> GroupedCodes:
    rows, columns = shape
    codes = codes_of(tensors["qweight"].t(), scheme.codes)[:, :columns]
    stored = codes_of(tensors["qzeros"], scheme.codes)[:, :rows].t()
    groups = checked_groups(scheme, tensors.get("g_idx"), columns)
    zeros = _zeros(scheme, stored)
    return integers(scheme, codes.contiguous(), tensors["scales"].t().contiguous(), zeros, groups)


def _zeros(scheme: WeightScheme, stored: Tensor) -> Tensor | None:
    """Return the zero points [N, G]; None if all of them are the centre.

    Raises ModelError if a symmetric scheme has other zero points.
    """
    four = scheme.codes is Codes.INT4
    if scheme.symmetric:
        centre = CENTRE if four else BYTE_CENTRE
        if not bool(((stored == centre) | (stored == centre - 1)).all()):
            raise ModelError("has zero points other than the centre, though its scheme is symmetric")
        return None
    if scheme.format is WeightFormat.GPTQ_V2:
        return stored
    # Where the zero is 0, the stored zero - 1 has wrapped around.
    return (stored + 1) & 15 if four else stored + 1


FORMAT = Format(_tensors, _read)
