"""The quantization of a model's weights: which are quantized, how they are stored, and how they are kept in memory.

A weight is [N, K]: N outputs, K inputs (columns). In all formats weight = code · scale + offset, with one scale for
each group of columns in a row.
"""

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache


class WeightFormat(StrEnum):
    """The format of a quantized weight; `tandem/engine/weights/quantized/` reads all except `ROUND_TO_NEAREST`."""

    AWQ = "awq"
    GPTQ = "gptq"
    """The format of GPTQ, in which zero points are stored minus 1."""
    GPTQ_V2 = "gptq_v2"
    """The format of GPTQ with zero points stored unchanged."""
    PACK_QUANTIZED = "pack-quantized"
    """The format of compressed-tensors with several integers in each 32-bit word."""
    INT_QUANTIZED = "int-quantized"
    """The format of compressed-tensors with one int8 byte per weight."""
    FLOAT_QUANTIZED = "float-quantized"
    """The format of compressed-tensors with one float8_e4m3fn byte per weight."""
    FP8_BLOCKS = "fp8"
    """The format of DeepSeek and Qwen3: one float8_e4m3fn byte per weight, with one scale per block."""
    MXFP4 = "mxfp4"
    """The format of gpt-oss: FP4 codes, with one E8M0 scale per 32 columns."""
    NVFP4 = "nvfp4"
    """The format of ModelOpt: FP4 codes, with one E4M3 scale per 16 columns and one float32 scale per weight."""
    NVFP4_PACK_QUANTIZED = "nvfp4-pack-quantized"
    """The format of compressed-tensors that differs from `NVFP4` only in the reciprocal of the float32 scale."""
    Q8_0 = "Q8_0"
    """A block type of GGUF, as are Q4_0, Q4_1, Q4_K, Q6_K and MXFP4."""
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q4_K = "Q4_K"
    Q6_K = "Q6_K"
    MXFP4_BLOCKS = "MXFP4"
    ROUND_TO_NEAREST = "round-to-nearest"
    """16-bit weights, which are quantized by rounding to nearest while they are loaded."""


class Codes(StrEnum):
    """The type of a weight's quantized values (codes)."""

    INT8 = "int8"
    FLOAT8 = "fp8"
    INT4 = "int4"
    FLOAT4 = "fp4"
    """E2M1: a sign, two bits of exponent and one of mantissa."""


AT_LOAD = (Codes.INT8, Codes.FLOAT8, Codes.INT4)
"""The codes to which 16-bit weights can be rounded while they are loaded."""
STACKED_FORMATS = {
    WeightFormat.MXFP4,
    WeightFormat.MXFP4_BLOCKS,
    WeightFormat.Q8_0,
    WeightFormat.Q4_0,
    WeightFormat.Q4_1,
    WeightFormat.Q4_K,
    WeightFormat.Q6_K,
}
"""The formats of experts that a checkpoint stacks in one tensor [E, N, …], whose name does not end with `.weight`."""
_HALF_SCALES = {WeightFormat.Q8_0, WeightFormat.Q4_0, WeightFormat.Q4_1}
"""Formats whose scales and offsets are kept in float16, as stored; those of other formats are kept in float32."""
_NVFP4 = {WeightFormat.NVFP4, WeightFormat.NVFP4_PACK_QUANTIZED}
LEAST_GROUP = 16
"""Minimum number of columns in a group; weights with smaller groups are dequantized at load."""
_FLOAT4_COLUMNS = 32
"""A weight of FP4 codes has a multiple of this number of columns, or is dequantized at load."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The format in which a quantized weight is kept in memory, see `tandem.engine.kernels.packed_weight`."""

    codes: Codes
    group: int
    """The number of columns that share a scale; it divides K."""
    offsets: bool
    """True if the weight has offsets, one for each group."""
    scales: str = "float32"
    """The dtype of scales and offsets."""
    quantized_inputs: bool = False
    """True if the linear layer quantizes its inputs, see `WeightScheme`."""


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """The quantization of one module's weight."""

    format: WeightFormat
    codes: Codes
    group: int | None = None
    """The number of columns that share a scale; None = all columns of a row."""
    block_rows: int = 1
    """The number of rows that share scales: a scale is for a block of `block_rows` rows and `group` columns."""
    symmetric: bool = True
    """False if each group has a zero point."""
    scattered: bool = False
    """True if the columns of a group may be anywhere in the row (`desc_act`)."""
    sparse: bool = False
    """True if only two of each four codes are stored, with a bit mask of their columns (`sparse-24-bitmask`)."""
    quantized_inputs: bool = False
    """True if the linear layer quantizes its inputs to the type of the codes, with one scale per token and group.

    It has no effect on weights with zero points (docs/decisions/quantized_weights.md).
    """

    def packing(self, columns: int) -> Packing | None:
        """Return the format in which a weight of `columns` columns is kept; None = as dequantized values.

        A weight is dequantized, to the model's dtype, if the columns of a group are scattered. It is also dequantized
        if the largest group size that divides both the scheme's groups and the row is below `LEAST_GROUP`, or odd for
        4-bit codes; and if its codes are FP4, and its columns are no multiple of 32.
        """
        if self.codes is Codes.FLOAT4:
            if columns % _FLOAT4_COLUMNS:
                return None
            assert self.group is not None
            scales = "float8_e4m3fn" if self.format in _NVFP4 else "float8_e8m0fnu"
            return Packing(self.codes, self.group, offsets=False, scales=scales)
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
    """Return the number of columns that share a scale in a weight quantized at load.

    It is `columns`; for 4-bit codes, it is the largest of 128, 64 and 32 that divides `columns`, or 1 if none does.
    """
    if codes is not Codes.INT4:
        return columns
    return next((group for group in (128, 64, 32) if columns % group == 0), 1)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization schemes of a model's modules."""

    method: str
    """`quant_method` of the checkpoint, or a value of `Codes` if the weights are quantized at load."""
    rules: tuple[tuple[str, WeightScheme | None], ...]
    """Regular expressions of module names with their schemes; the first that matches the whole name applies."""
    plain: frozenset[str] = frozenset()
    """The modules that are not quantized: whole names, or parts of names between dots (`mlp.gate`)."""

    @property
    def at_load(self) -> bool:
        """True if 16-bit weights are quantized while they are loaded."""
        return any(scheme and scheme.format is WeightFormat.ROUND_TO_NEAREST for _, scheme in self.rules)

    @property
    def has_float8(self) -> bool:
        """True if any weights have FP8 codes."""
        return any(scheme and scheme.codes is Codes.FLOAT8 for _, scheme in self.rules)

    @property
    def separates_experts(self) -> bool:
        """True if the format has no form for experts that are stacked in one tensor, so that each has its own."""
        schemes = [scheme for _, scheme in self.rules if scheme is not None]
        return bool(schemes) and not self.at_load and all(scheme.format not in STACKED_FORMATS for scheme in schemes)

    def scheme_of(self, module: str) -> WeightScheme | None:
        """Return the scheme of a module, for example `model.layers.0.mlp.down_proj`; None if it is not quantized."""
        parts = module.split(".")
        ends = range(1, len(parts) + 1)
        if self.plain and any(".".join(parts[first:end]) in self.plain for end in ends for first in range(end)):
            return None
        return next((scheme for pattern, scheme in self.rules if _compiled(pattern).fullmatch(module)), None)

    def stacks_experts(self, module: str) -> bool:
        """Return True if a module has the codes of all experts of a layer in one tensor, with their outputs as rows."""
        scheme = self.scheme_of(module)
        return scheme is not None and scheme.format in STACKED_FORMATS


def at_load(name: str) -> Quantization:
    """Return the quantization of a model whose 16-bit weights are quantized while they are loaded.

    All linear layers of the decoder layers are quantized. `name` is one of `AT_LOAD`. With fp8, the inputs of
    the linear layers are quantized as well.
    """
    codes = Codes(name)
    scheme = WeightScheme(WeightFormat.ROUND_TO_NEAREST, codes, quantized_inputs=codes is Codes.FLOAT8)
    return Quantization(name, ((r"(model|backbone)\.layers\..*", scheme),))


def check_patterns(quantization: Quantization) -> None:
    """Raise re.error if a rule is not a valid regular expression."""
    for pattern, _ in quantization.rules:
        _compiled(pattern)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
