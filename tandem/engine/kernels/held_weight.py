"""Determines how kernels keep a packed weight: as codes, or dequantized if no kernel multiplies its codes."""

from math import gcd

import torch

from tandem.engine.kernels.packed_weight import FLOAT4_TILE, TILE, Float4Weight, PackedWeight

LEAST_COLUMNS = 16
"""Minimum number of columns that the tensor cores of GPUs multiply."""
CODES_A_BLOCK = 32
"""Number of columns whose products a CPU sums as integers, with one scale of the input; a divisor of `group`."""
_GPU_SCALE_BYTES = 4
"""Size of a scale or offset in bytes: GPUs keep them in float32, CPUs in float16 (`PanelWeight`)."""
_CPU_SCALE_BYTES = 2
_FLOAT4_BYTES = 64
"""Number of bytes of FP4 codes that a GPU kernel reads at a time: their scales are one word, or two."""


def multiplied_on_cpus(weight: PackedWeight) -> bool:
    """Return True if CPUs multiply the codes: they are not FP8, and each scale covers whole blocks of columns.

    FP4 codes are multiplied as int8: they are twice their values.
    """
    return weight.codes.dtype in {torch.int8, torch.uint8} and weight.group % CODES_A_BLOCK == 0


def multiplied_on_gpus(weight: PackedWeight) -> bool:
    """Return True if GPUs multiply the codes: enough columns share a scale for the tensor cores.

    FP4 codes are scaled before they are multiplied, so their groups may be of any size.
    """
    return step_bytes(weight) >= LEAST_COLUMNS


def step_bytes(weight: PackedWeight) -> int:
    """Return the maximum number of bytes of a row's codes that a GPU kernel reads at a time; the least for FP4 codes.

    Except with FP4 codes, the columns in these bytes share one scale. With 4-bit codes, this holds separately for the
    columns in the lower halves of the bytes and for those in the upper halves.
    """
    if isinstance(weight, Float4Weight):
        return _FLOAT4_BYTES
    columns = weight.shape[-1]
    group = 0 if weight.group == columns else weight.group  # gcd(n, 0) is n: a single scale per row sets no bound
    if weight.bits == 8:
        return gcd(TILE, group)
    return gcd(gcd(TILE // 2, group), columns % TILE // 2)


def held_bytes(weight: PackedWeight, item_bytes: int, *, on_cpu: bool) -> int:
    """Return the number of bytes of a weight as kernels keep it.

    `item_bytes` is the size of an element if the weight is dequantized.
    """
    if not (multiplied_on_cpus(weight) if on_cpu else multiplied_on_gpus(weight)):
        return weight.shape.numel() * item_bytes
    if isinstance(weight, Float4Weight):
        if on_cpu:
            return weight.shape.numel() + weight.scales.numel() * _CPU_SCALE_BYTES
        tiles = -(-weight.shape[-1] // FLOAT4_TILE)
        words = -(-tiles * FLOAT4_TILE // weight.group // _GPU_SCALE_BYTES)
        return weight.codes.nbytes + weight.factors.numel() * (words + 1) * _GPU_SCALE_BYTES
    scales = weight.scales.numel() * (1 if weight.offsets is None else 2)
    return weight.codes.nbytes + scales * (_CPU_SCALE_BYTES if on_cpu else _GPU_SCALE_BYTES)
