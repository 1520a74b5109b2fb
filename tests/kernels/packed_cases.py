"""Random packed weights of every kind, for the tests of their products."""

import torch

from tandem.engine.kernels.packed_weight import PackedWeight, pack_nibbles

KINDS = ("int8", "int8_offsets", "int4", "int4_offsets", "fp8")


def make_packed(kind: str, shape: tuple[int, ...], group: int, seed: int = 0) -> PackedWeight:
    """Returns a weight [..., N, K] with values of about 1 / 8 in size; K is a multiple of `group`."""
    generator = torch.Generator().manual_seed(seed)
    *outer, columns = shape
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
