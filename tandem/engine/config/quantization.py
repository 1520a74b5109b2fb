"""The quantization of a model's weights: which have a scheme, how they are stored, and how they are kept in memory.

A weight is [N, K]: N outputs, K inputs (columns). All formats share one formula, weight = code · scale + offset, with a
scale for a group of columns of a row.
"""

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache


class WeightFormat(StrEnum):
    """A checkpoint's format of a quantized weight; each is read by a file in `tandem/engine/weights/quantized/`."""

    AWQ = "awq"
    GPTQ = "gptq"
    """Zero points are stored minus 1."""
    GPTQ_V2 = "gptq_v2"
    """Zero points are stored as they are."""
    PACK_QUANTIZED = "pack-quantized"
    """Integers of compressed-tensors, several in a 32-bit word."""
    INT_QUANTIZED = "int-quantized"
    """A byte a weight, int8."""
    FLOAT_QUANTIZED = "float-quantized"
    """A byte a weight, float8_e4m3fn."""
    FP8_BLOCKS = "fp8"
    """Likewise, with a scale a block, under the names of DeepSeek and Qwen3."""
    Q8_0 = "Q8_0"
    """This and the following ones: blocks of GGUF."""
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q4_K = "Q4_K"
    Q6_K = "Q6_K"
    ROUND_TO_NEAREST = "round-to-nearest"
    """16-bit weights, quantized while they are loaded."""


class Codes(StrEnum):
    """The type of the codes of a weight."""

    INT8 = "int8"
    FLOAT8 = "fp8"
    INT4 = "int4"


_HALF_SCALES = {WeightFormat.Q8_0, WeightFormat.Q4_0, WeightFormat.Q4_1}
"""Formats whose scales and offsets are float16 numbers as stored: elsewhere they are products."""
LEAST_GROUP = 16
"""The smallest group of columns that weights are kept in; those of smaller groups are dequantized at load."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The form in which a weight is kept, see `tandem.engine.kernels.packed_weight`."""

    codes: Codes
    group: int
    """Columns that share a scale; it divides K."""
    offsets: bool
    """True if each group has an offset of its own."""
    scales: str = "float32"
    """The dtype of scales and offsets."""
    quantized_inputs: bool = False
    """True if products quantize their inputs, see `WeightScheme`."""


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """The quantization of one module's weight."""

    format: WeightFormat
    codes: Codes
    group: int | None = None
    """Columns that share a scale; None = all columns of a row."""
    block_rows: int = 1
    """Rows that share the scales of their groups."""
    symmetric: bool = True
    """False if each group has a zero point."""
    scattered: bool = False
    """True if the columns of a group may lie anywhere in the row (`desc_act`)."""
    quantized_inputs: bool = False
    """True if products quantize their inputs to codes of the same type, with a scale for each token and group.

    Of weights with zero points they do not (docs/decisions/quantized_weights.md).
    """

    def packing(self, columns: int) -> Packing | None:
        """Returns the form in which a weight of so many columns is kept; None = dequantized, in the model's dtype.

        That is the case where columns of a group are scattered, or groups do not divide a row evenly.
        """
        if self.format is WeightFormat.ROUND_TO_NEAREST:
            group = _rounding_group(self.codes, columns)
        else:
            group = columns if self.group is None else math.gcd(self.group, columns)
        if self.scattered or (self.codes is Codes.INT4 and group % 2) or group < min(LEAST_GROUP, columns):
            return None
        scales = "float16" if self.format in _HALF_SCALES else "float32"
        quantized = self.quantized_inputs and self.symmetric
        return Packing(self.codes, group, offsets=not self.symmetric, scales=scales, quantized_inputs=quantized)


def _rounding_group(codes: Codes, columns: int) -> int:
    """Returns the group of a weight that is quantized while it is loaded: a row, of 4-bit codes 128 if that divides."""
    if codes is not Codes.INT4:
        return columns
    return next((group for group in (128, 64, 32) if columns % group == 0), 1)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The schemes of a model's modules."""

    method: str
    """`quant_method` of the checkpoint, or `Codes` for weights that are quantized while they are loaded."""
    rules: tuple[tuple[str, WeightScheme | None], ...]
    """Regular expressions of modules' names and their schemes; the first that matches a whole name decides."""
    plain: frozenset[str] = frozenset()
    """Modules that are not quantized whatever the rules say: names, or parts of names between dots (`mlp.gate`)."""

    @property
    def at_load(self) -> bool:
        """True if 16-bit weights are quantized while they are loaded."""
        return any(each and each.format is WeightFormat.ROUND_TO_NEAREST for _, each in self.rules)

    @property
    def has_float8(self) -> bool:
        """True if some weights have FP8 codes."""
        return any(each and each.codes is Codes.FLOAT8 for _, each in self.rules)

    def scheme_of(self, module: str) -> WeightScheme | None:
        """Returns the scheme of a module (`model.layers.0.mlp.down_proj`), None = not quantized."""
        parts = module.split(".")
        ends = range(1, len(parts) + 1)
        if any(".".join(parts[first:end]) in self.plain for end in ends for first in range(end)):
            return None
        return next((scheme for pattern, scheme in self.rules if _compiled(pattern).fullmatch(module)), None)


def at_load(name: str) -> Quantization:
    """Returns the quantization of 16-bit weights at load to `int8`, `fp8` or `int4`: all products of the layers.

    With fp8 their inputs are quantized, too.
    """
    codes = Codes(name)
    scheme = WeightScheme(WeightFormat.ROUND_TO_NEAREST, codes, quantized_inputs=codes is Codes.FLOAT8)
    return Quantization(name, ((r"model\.layers\..*", scheme),))


def check_patterns(quantization: Quantization) -> None:
    """Raises re.error for a rule that is no regular expression."""
    for pattern, _ in quantization.rules:
        _compiled(pattern)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
