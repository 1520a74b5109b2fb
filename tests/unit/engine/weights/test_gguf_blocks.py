"""Blocks of GGUF, of random bytes, against loops over their elements and against the gguf package."""

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch

from tandem.engine.config.quantization import WeightFormat
from tandem.engine.models.quantization_config import GGUF_SCHEMES
from tandem.engine.weights.quantized import FORMATS
from tandem.engine.weights.quantized.gguf_blocks import BLOCKS

ROWS, COLUMNS = 3, 512


def half(block: np.ndarray, at: int) -> float:
    return float(block[at : at + 2].view(np.float16)[0])


def signed(value: int) -> int:
    return value - 256 if value > 127 else value


def q8_0(block: np.ndarray) -> list[float]:
    return [half(block, 0) * signed(int(code)) for code in block[2:]]


def q4_0(block: np.ndarray) -> list[float]:
    return [half(block, 0) * (code - 8) for code in four_bits(block[2:])]


def q4_1(block: np.ndarray) -> list[float]:
    return [half(block, 0) * code + half(block, 2) for code in four_bits(block[4:])]


def four_bits(pairs: np.ndarray) -> list[int]:
    return [int(pair) % 16 for pair in pairs] + [int(pair) // 16 for pair in pairs]


def q4_k(block: np.ndarray) -> list[float]:
    packed = [int(byte) for byte in block[4:16]]
    values = []
    for part in range(8):
        if part < 4:
            scale, minimum = packed[part] % 64, packed[part + 4] % 64
        else:
            scale = packed[part + 4] % 16 + packed[part - 4] // 64 * 16
            minimum = packed[part + 4] // 16 + packed[part] // 64 * 16
        for slot in range(32):
            pair = int(block[16 + part // 2 * 32 + slot])
            code = pair // 16 if part % 2 else pair % 16
            values.append(half(block, 0) * scale * code - half(block, 2) * minimum)
    return values


def q6_k(block: np.ndarray) -> list[float]:
    values = []
    for element in range(256):
        side, slot = divmod(element, 128)
        quarter, column = divmod(slot, 32)
        lower = int(block[side * 64 + quarter % 2 * 32 + column])
        lower = lower // 16 if quarter > 1 else lower % 16
        upper = int(block[128 + side * 32 + column]) >> 2 * quarter & 3
        scale = signed(int(block[192 + element // 16]))
        values.append(half(block, 208) * scale * (lower + 16 * upper - 32))
    return values


KINDS: dict[str, tuple[Callable[[np.ndarray], list[float]], tuple[int, ...]]] = {
    "Q8_0": (q8_0, (0,)),
    "Q4_0": (q4_0, (0,)),
    "Q4_1": (q4_1, (0, 2)),
    "Q4_K": (q4_k, (0, 2)),
    "Q6_K": (q6_k, (208,)),
}
"""Each type with the bytes at which its blocks have float16 numbers."""


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_mean_what_the_format_says(kind: str) -> None:
    decode, schedulers = KINDS[kind]
    elements, size = BLOCKS[WeightFormat(kind)]
    rng = np.random.default_rng(3)
    stored = rng.integers(0, 256, (ROWS, COLUMNS // elements, size), dtype=np.uint8)
    for at in schedulers:
        numbers = rng.uniform(-0.1, 0.1, stored.shape[:2]).astype(np.float16)
        stored[..., at : at + 2] = numbers[..., None].view(np.uint8)
    wanted = np.array([[value for block in row for value in decode(block)] for row in stored], dtype=np.float32)
    theirs = gguf.quants.dequantize(stored.reshape(ROWS, -1), gguf.GGMLQuantizationType[kind])
    np.testing.assert_allclose(theirs, wanted, rtol=1e-5, atol=1e-6)
    scheme = GGUF_SCHEMES[kind]
    weight = torch.from_numpy(stored.reshape(ROWS, -1))
    assert FORMATS[scheme.format].tensors(scheme, ROWS, COLUMNS)[0].shapes == (tuple(weight.shape),)
    codes = FORMATS[scheme.format].read(scheme, {"weight": weight}, (ROWS, COLUMNS))
    packing = scheme.packing(COLUMNS)
    assert packing is not None
    for actual in (codes.matrix(), codes.packed(packing, None).dequantized(torch.float32)):
        torch.testing.assert_close(actual, torch.from_numpy(wanted), rtol=1e-5, atol=1e-6)
