"""FP4 codes (E2M1), two per byte with the first column in the lower half: MXFP4 of gpt-oss, and NVFP4 of two tools.

MXFP4
  _blocks  U8 [N, K / 32, 16]
  _scales  U8 [N, K / 32], E8M0
NVFP4 of ModelOpt
  weight          U8 [N, K / 2]
  weight_scale    F8_E4M3 [N, K / 16]
  weight_scale_2  one F32, which is multiplied as well
NVFP4 of compressed-tensors (`nvfp4-pack-quantized`)
  weight_packed        U8 [N, K / 2]
  weight_scale         F8_E4M3 [N, K / 16]
  weight_global_scale  one F32, by which the weight is divided

The scales of activations are ignored: activations are not quantized to 4 bits.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.engine.config.quantization import WeightFormat, WeightScheme
from tandem.engine.weights.quantized.format import (
    Format,
    GroupedCodes,
    Shape,
    StoredTensor,
    byte_nibbles,
    group_count,
    unread,
)
from tandem.protocol.errors import ModelError

_BYTES = frozenset({"U8"})
_LARGEST_E4M3, _E8M0_NAN = 0x7E, 0xFF


def _tensors(scheme: WeightScheme, rows: int, columns: int) -> tuple[StoredTensor, ...]:
    assert scheme.group is not None
    if columns % scheme.group:
        raise ModelError(f"{columns} columns are no whole groups of {scheme.group} of {scheme.format}")
    groups = group_count(scheme, columns)
    if scheme.format is WeightFormat.MXFP4:
        blocks = StoredTensor("_blocks", ((rows, groups, scheme.group // 2),), _BYTES)
        return (blocks, StoredTensor("_scales", ((rows, groups),), _BYTES))
    codes, factor = _names(scheme)
    return (
        StoredTensor(codes, ((rows, columns // 2),), _BYTES),
        StoredTensor("weight_scale", ((rows, groups),), frozenset({"F8_E4M3"})),
        StoredTensor(factor, ((), (1,)), frozenset({"F32"})),
        *unread("input_scale", "input_global_scale"),
    )


def _names(scheme: WeightScheme) -> tuple[str, str]:
    """Return the names of the tensors with the codes and with the scale of a whole NVFP4 weight."""
    if scheme.format is WeightFormat.NVFP4:
        return "weight", "weight_scale_2"
    return "weight_packed", "weight_global_scale"


def _read(scheme: WeightScheme, tensors: Mapping[str, Tensor], shape: Shape) -> GroupedCodes:
    assert scheme.group is not None
    if scheme.format is WeightFormat.MXFP4:
        pairs, scales = tensors["_blocks"].flatten(1), tensors["_scales"]
        return float4(byte_nibbles(pairs), scales, scheme.group)
    codes_name, factor_name = _names(scheme)
    pairs, factor = tensors[codes_name], tensors[factor_name].reshape(())
    if not bool(torch.isfinite(factor)) or float(factor) <= 0:
        raise ModelError(f"has a {factor_name} of {float(factor):g}, which must be above 0")
    codes = byte_nibbles(pairs)
    if scheme.format is WeightFormat.NVFP4_PACK_QUANTIZED:
        factor = factor.reciprocal()
    return float4(codes, tensors["weight_scale"], scheme.group, factor)


def float4(codes: Tensor, scales: Tensor, group: int, factor: Tensor | None = None) -> GroupedCodes:
    """Return the weight of E2M1 codes [N, K]; scales [N, K / group] are float8_e4m3fn, or uint8 with the bits of E8M0.

    `factor` is that of the whole weight; None = 1. Raises ModelError if a scale is negative or not a number.
    """
    held = scales.view(torch.uint8)
    exponents = scales.dtype == torch.uint8
    if bool((held == _E8M0_NAN).any() if exponents else (held > _LARGEST_E4M3).any()):
        raise ModelError("has scales that are negative or not numbers")
    factors = torch.ones(len(codes), 1, device=codes.device)
    if factor is not None:
        factors *= factor
    return GroupedCodes(codes, held.view(torch.float8_e8m0fnu) if exponents else scales, None, group, factors=factors)


FORMAT = Format(_tensors, _read)
