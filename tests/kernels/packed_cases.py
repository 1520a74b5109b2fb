"""Random packed weights of every kind, for the tests of their products."""

from dataclasses import fields, replace

import torch

from tandem.engine.kernels.packed_weight import FLOAT4_TILE, Float4Weight, PackedWeight, pack_nibbles

KINDS = ("int8", "int8_offsets", "int4", "int4_offsets", "fp8", "mxfp4", "nvfp4")
FLOAT4_KINDS = ("mxfp4", "nvfp4")


def make_packed(kind: str, shape: tuple[int, ...], group: int, seed: int = 0) -> PackedWeight:
    """Returns a weight [..., N, K] with values of about 1 / 8 in size; K is a multiple of `group`.

    The groups of FP4 weights are those of their format, and the size of some groups is an outlier.
    """
    generator = torch.Generator().manual_seed(seed)
    *outer, columns = shape
    if kind in FLOAT4_KINDS:
        return _make_float4(kind, shape, generator)
    scales = torch.rand(*outer, columns // group, generator=generator) + 0.5
    if kind == "fp8":
        codes = torch.randn(*shape, generator=generator).to(torch.float8_e4m3fn)
        return PackedWeight(codes, (scales / 8).bfloat16(), None, group)
    if kind.startswith("int8"):
        codes = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
        offsets = torch.randn(scales.shape, generator=generator) / 8 if kind.endswith("offsets") else None
        return PackedWeight(codes, scales / 512, offsets, group)
    codes = pack_nibbles(torch.randint(16, shape, generator=generator))
    scales = (scales / 32).half()
    offsets = (scales * -torch.randint(4, 12, scales.shape, generator=generator)) if kind.endswith("offsets") else None
    return PackedWeight(codes, scales, offsets, group)


def _make_float4(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Float4Weight:
    *outer, columns = shape
    codes = pack_nibbles(torch.randint(16, shape, generator=generator), FLOAT4_TILE)
    factors = torch.rand(outer, generator=generator) + 0.5
    if kind == "mxfp4":
        scales = torch.randint(118, 124, (*outer, columns // 32), generator=generator).to(torch.uint8)
        return Float4Weight(codes, scales.view(torch.float8_e8m0fnu), None, 32, factors)
    numbers = torch.randn(*outer, columns // 16, generator=generator).abs() * 32
    numbers[..., 0] = 0.0
    numbers[..., 1] = 2**-9
    return Float4Weight(codes, numbers.to(torch.float8_e4m3fn), None, 16, factors / 1024)


def on_device(weight: PackedWeight, device: torch.device) -> PackedWeight:
    """Returns a copy of a weight on a device."""
    moved = {
        field.name: value.to(device)
        for field in fields(weight)
        if isinstance(value := getattr(weight, field.name), torch.Tensor)
    }
    return replace(weight, **moved)
