"""`pack-quantized` of compressed-tensors: 4-bit or 8-bit integers in 32-bit words, around the centre of the codes.

weight_packed      I32 [N, ⌈K / c⌉], c codes per word, the lowest bits first
weight_scale       [N, G]
weight_zero_point  I32 [⌈N / c⌉, G], packed along the rows, if zero points are used
weight_g_idx       I32 [K]: the group of each column, if columns are scattered
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
    checked_groups,
    codes_of,
    group_count,
    in_word,
    integers,
    unread,
)


def _tensors(scheme: WeightScheme, rows: int, columns: int) -> tuple[StoredTensor, ...]:
    word, groups = in_word(scheme.codes), group_count(scheme, columns)
    shapes: tuple[Shape, ...] = ((rows, groups),)
    tensors: tuple[StoredTensor, ...] = (
        StoredTensor("weight_packed", ((rows, -(-columns // word)),), WORDS),
        StoredTensor("weight_scale", ((), (1,), (rows,), *shapes) if scheme.group is None else shapes, FLOATS),
    )
    if not scheme.symmetric:
        tensors += (StoredTensor("weight_zero_point", ((-(-rows // word), groups),), WORDS),)
    tensors += (StoredTensor("weight_g_idx", ((columns,),), WORDS, required=scheme.scattered),)
    names = {tensor.name for tensor in tensors}
    more = unread("weight_shape", "weight_zero_point", "input_scale", "input_zero_point")
    return (*tensors, *(tensor for tensor in more if tensor.name not in names))


def _read(scheme: WeightScheme, tensors: Mapping[str, Tensor], shape: Shape) -> GroupedCodes:
    rows, columns = shape
    codes = codes_of(tensors["weight_packed"], scheme.codes)[:, :columns]
    scales = tensors["weight_scale"]
    if scheme.group is None:
        scales = scales.reshape(-1, 1).expand(rows, 1)
    zeros = None
    if not scheme.symmetric:
        zeros = codes_of(tensors["weight_zero_point"].t(), scheme.codes).t()[:rows]
    groups = checked_groups(scheme, tensors.get("weight_g_idx"), columns)
    return integers(scheme, codes.contiguous(), scales, zeros, groups)


FORMAT = Format(_tensors, _read)
