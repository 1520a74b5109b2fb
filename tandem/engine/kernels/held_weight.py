"""The form in which kernels keep a packed weight: its codes, or dequantized where no product takes them."""

from math import gcd

import torch

from tandem.engine.kernels.packed_weight import TILE, PackedWeight

LEAST_COLUMNS = 16
"""The least number of columns that the matrix units of GPUs multiply."""
CODES_A_BLOCK = 32
"""Columns whose products a CPU sums as integers: those of one scale of an input. It divides a weight's group."""
_GPU_SCALE_BYTES = 4
"""GPUs keep scales and offsets in float32, CPUs in float16 (`PanelWeight`)."""
_CPU_SCALE_BYTES = 2


def multiplied_on_cpus(weight: PackedWeight) -> bool:
    """Returns True if CPUs multiply codes: they are not FP8, and scales cover whole blocks of columns."""
    return weight.codes.dtype in {torch.int8, torch.uint8} and weight.group % CODES_A_BLOCK == 0


def multiplied_on_gpus(weight: PackedWeight) -> bool:
    """Returns True if GPUs multiply codes: pieces of its groups are wide enough for the matrix units."""
    return step_bytes(weight) >= LEAST_COLUMNS


def step_bytes(weight: PackedWeight) -> int:
    """Returns the most bytes of codes in a row that have a single scale wherever a step of that width begins."""
    columns = weight.shape[-1]
    group = 0 if weight.group == columns else weight.group  # one scale a row bounds nothing
    if weight.bits == 8:
        return gcd(TILE, group)
    return gcd(gcd(TILE // 2, group), columns % TILE // 2)


def held_bytes(weight: PackedWeight, item_bytes: int, *, on_cpu: bool) -> int:
    """Returns the bytes that kernels keep; `item_bytes` is an element's of a weight that is not packed."""
    if not (multiplied_on_cpus(weight) if on_cpu else multiplied_on_gpus(weight)):
        return weight.shape.numel() * item_bytes
    scales = weight.scales.numel() * (1 if weight.offsets is None else 2)
    return weight.codes.nbytes + scales * (_CPU_SCALE_BYTES if on_cpu else _GPU_SCALE_BYTES)
