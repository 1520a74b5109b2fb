"""Packed weights: their layout, their views and their values."""

import pytest
import torch

from tandem.engine.kernels.packed_weight import PackedWeight, pack_nibbles, unpack_nibbles


@pytest.mark.parametrize("columns", [2, 64, 128, 192, 576])
def test_nibbles_are_planar_within_tiles(columns: int) -> None:
    codes = torch.randint(16, (3, columns), dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.shape == (3, columns // 2)
    assert torch.equal(unpack_nibbles(packed), codes)
    half = min(128, columns) // 2
    assert torch.equal(packed[:, 0] & 15, codes[:, 0])
    assert torch.equal(packed[:, 0] >> 4, codes[:, half])


def test_values_are_codes_times_scales_plus_offsets() -> None:
    codes = torch.randint(16, (4, 256), dtype=torch.uint8)
    scales, offsets = torch.rand(4, 2), torch.rand(4, 2)
    packed = PackedWeight(pack_nibbles(codes), scales, offsets, group=128)
    assert packed.bits == 4
    assert packed.shape == (4, 256)
    for row, column in ((0, 0), (1, 127), (2, 128), (3, 255)):
        expected = codes[row, column] * scales[row, column // 128] + offsets[row, column // 128]
        assert packed.dequantized(torch.float32)[row, column] == expected
    centred = PackedWeight(packed.codes, scales, None, group=128)
    assert centred.dequantized(torch.float32)[3, 200] == (int(codes[3, 200]) - 8) * scales[3, 1]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_views_write_into_the_whole(dtype: torch.dtype) -> None:
    whole = PackedWeight(torch.zeros(6, 32).to(dtype), torch.ones(6, 1), None, group=32)
    first, second = whole.split_with_sizes([2, 4])
    second.codes.copy_(torch.ones(4, 32).to(dtype))
    assert whole.dequantized(torch.float32).sum(dim=1).tolist() == [0, 0, 32, 32, 32, 32]
    assert (len(first), len(second), first.shape) == (2, 4, (2, 32))
    assert [len(part) for part in whole.chunk(3)] == [2, 2, 2]
    assert whole.nbytes == 6 * 32 + 6 * 4
