"""Measured tiles of the weight-streaming products (H200, bf16), from `python -m benchmarks.kernels products`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gemv:
    """The tile for one token: a program multiplies `rows` rows of the weight with `columns` of the input at a time."""

    rows: int
    columns: int
    warps: int


@dataclass(frozen=True, slots=True)
class Skinny:
    """The tile for several tokens: a program computes `rows` outputs of `tokens` tokens, `columns` at a time.

    splits: programs that share the input columns of one output tile
    stages: depth of the load pipeline
    early:  bytes of each weight row that are prefetched into L2 before the input is ready
    """

    rows: int
    tokens: int
    columns: int
    splits: int
    stages: int
    warps: int
    early: int = 0


Tile = Gemv | Skinny
Shape = tuple[int, int, bool]
"""(rows of the weight, columns of the weight, True if the rows are gate and up)."""

TUNED: dict[Shape, dict[int, Tile]] = {
    (6144, 4096, False): {
        1: Gemv(rows=4, columns=4096, warps=4),
        16: Skinny(rows=64, tokens=16, columns=128, splits=2, stages=4, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=2, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=2, stages=3, warps=4, early=512),
        128: Skinny(rows=64, tokens=128, columns=64, splits=2, stages=4, warps=4, early=512),
    },
    (4096, 4096, False): {
        1: Gemv(rows=4, columns=4096, warps=8),
        16: Skinny(rows=64, tokens=16, columns=256, splits=2, stages=3, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=2, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=4, stages=3, warps=4, early=512),
        128: Skinny(rows=64, tokens=128, columns=64, splits=2, stages=4, warps=4, early=512),
    },
    (28672, 4096, True): {
        1: Gemv(rows=1, columns=4096, warps=8),
        16: Skinny(rows=64, tokens=16, columns=256, splits=1, stages=3, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=1, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=1, stages=3, warps=4, early=512),
        128: Skinny(rows=128, tokens=128, columns=64, splits=2, stages=4, warps=8, early=512),
    },
    (4096, 14336, False): {
        1: Gemv(rows=8, columns=2048, warps=8),
        16: Skinny(rows=64, tokens=16, columns=256, splits=2, stages=3, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=4, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=4, stages=3, warps=4, early=512),
        128: Skinny(rows=128, tokens=128, columns=128, splits=4, stages=3, warps=8, early=512),
    },
    (128256, 4096, False): {
        1: Gemv(rows=2, columns=4096, warps=8),
        16: Skinny(rows=64, tokens=16, columns=128, splits=1, stages=4, warps=4, early=512),
        32: Skinny(rows=128, tokens=32, columns=64, splits=1, stages=4, warps=8, early=512),
        64: Skinny(rows=128, tokens=64, columns=64, splits=1, stages=4, warps=4, early=512),
        128: Skinny(rows=256, tokens=128, columns=64, splits=1, stages=3, warps=8, early=512),
    },
    (4096, 1024, False): {
        1: Gemv(rows=4, columns=1024, warps=2),
        16: Skinny(rows=64, tokens=16, columns=128, splits=4, stages=4, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=4, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=4, stages=3, warps=4, early=512),
        128: Skinny(rows=64, tokens=128, columns=64, splits=4, stages=4, warps=4, early=512),
    },
    (1024, 2048, False): {
        1: Gemv(rows=2, columns=2048, warps=4),
        16: Skinny(rows=64, tokens=16, columns=256, splits=4, stages=3, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=8, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=8, stages=3, warps=4, early=512),
        128: Skinny(rows=64, tokens=128, columns=64, splits=8, stages=4, warps=4, early=512),
    },
    (6144, 1024, True): {
        1: Gemv(rows=2, columns=1024, warps=2),
        16: Skinny(rows=64, tokens=16, columns=256, splits=2, stages=3, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=4, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=4, stages=3, warps=4, early=512),
        128: Skinny(rows=64, tokens=128, columns=64, splits=4, stages=4, warps=4, early=512),
    },
    (1024, 3072, False): {
        1: Gemv(rows=2, columns=4096, warps=2),
        16: Skinny(rows=64, tokens=16, columns=256, splits=4, stages=3, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=8, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=8, stages=3, warps=4, early=512),
        128: Skinny(rows=64, tokens=128, columns=64, splits=8, stages=4, warps=4, early=512),
    },
    (151936, 1024, False): {
        1: Gemv(rows=4, columns=512, warps=2),
        16: Skinny(rows=64, tokens=16, columns=128, splits=1, stages=4, warps=4, early=512),
        32: Skinny(rows=128, tokens=32, columns=64, splits=1, stages=4, warps=8, early=512),
        64: Skinny(rows=128, tokens=64, columns=64, splits=1, stages=4, warps=4, early=512),
        128: Skinny(rows=256, tokens=128, columns=64, splits=1, stages=3, warps=8, early=512),
    },
    (3072, 2048, False): {
        1: Gemv(rows=4, columns=2048, warps=4),
        16: Skinny(rows=64, tokens=16, columns=128, splits=4, stages=4, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=4, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=4, stages=3, warps=4, early=512),
        128: Skinny(rows=64, tokens=128, columns=64, splits=4, stages=4, warps=4, early=512),
    },
    (2048, 2048, False): {
        1: Gemv(rows=4, columns=2048, warps=8),
        16: Skinny(rows=64, tokens=16, columns=256, splits=4, stages=3, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=4, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=4, stages=3, warps=4, early=512),
        128: Skinny(rows=64, tokens=128, columns=64, splits=4, stages=4, warps=4, early=512),
    },
    (16384, 2048, True): {
        1: Gemv(rows=1, columns=2048, warps=4),
        16: Skinny(rows=64, tokens=16, columns=256, splits=1, stages=3, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=1, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=1, stages=3, warps=4, early=512),
        128: Skinny(rows=64, tokens=128, columns=64, splits=1, stages=4, warps=4, early=512),
    },
    (2048, 8192, False): {
        1: Gemv(rows=2, columns=2048, warps=4),
        16: Skinny(rows=64, tokens=16, columns=256, splits=4, stages=3, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=4, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=4, stages=3, warps=4, early=512),
        128: Skinny(rows=64, tokens=128, columns=64, splits=4, stages=4, warps=4, early=512),
    },
    (128256, 2048, False): {
        1: Gemv(rows=2, columns=2048, warps=4),
        16: Skinny(rows=64, tokens=16, columns=128, splits=1, stages=4, warps=4, early=512),
        32: Skinny(rows=128, tokens=32, columns=64, splits=1, stages=4, warps=8, early=512),
        64: Skinny(rows=128, tokens=64, columns=64, splits=1, stages=4, warps=4, early=512),
        128: Skinny(rows=256, tokens=128, columns=64, splits=1, stages=3, warps=8, early=512),
    },
    (3072, 4096, False): {
        1: Gemv(rows=4, columns=4096, warps=4),
        16: Skinny(rows=64, tokens=16, columns=128, splits=4, stages=4, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=4, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=4, stages=3, warps=4, early=512),
        128: Skinny(rows=64, tokens=128, columns=64, splits=4, stages=4, warps=4, early=512),
    },
    (4096, 2048, False): {
        1: Gemv(rows=2, columns=1024, warps=2),
        16: Skinny(rows=64, tokens=16, columns=256, splits=2, stages=3, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=4, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=2, stages=3, warps=4, early=512),
        128: Skinny(rows=64, tokens=128, columns=64, splits=2, stages=4, warps=4, early=512),
    },
    (14336, 4096, True): {
        1: Gemv(rows=1, columns=4096, warps=8),
    },
    (4096, 7168, False): {
        1: Gemv(rows=4, columns=1024, warps=4),
        16: Skinny(rows=64, tokens=16, columns=256, splits=2, stages=3, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=4, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=4, stages=3, warps=4, early=512),
        128: Skinny(rows=64, tokens=128, columns=64, splits=4, stages=4, warps=4, early=512),
    },
    (64128, 4096, False): {
        1: Gemv(rows=1, columns=4096, warps=2),
        16: Skinny(rows=64, tokens=16, columns=128, splits=1, stages=4, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=1, stages=4, warps=4, early=512),
        64: Skinny(rows=128, tokens=64, columns=64, splits=1, stages=4, warps=4, early=512),
        128: Skinny(rows=256, tokens=128, columns=64, splits=1, stages=3, warps=8, early=512),
    },
    (5120, 8192, False): {
        1: Gemv(rows=4, columns=1024, warps=2),
        16: Skinny(rows=64, tokens=16, columns=128, splits=2, stages=4, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=2, stages=4, warps=4, early=512),
        64: Skinny(rows=128, tokens=64, columns=64, splits=4, stages=4, warps=4, early=512),
    },
    (8192, 4096, False): {
        1: Gemv(rows=2, columns=4096, warps=8),
        16: Skinny(rows=64, tokens=16, columns=256, splits=1, stages=3, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=1, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=2, stages=3, warps=4, early=512),
    },
    (28672, 8192, True): {
        1: Gemv(rows=2, columns=4096, warps=4),
        16: Skinny(rows=64, tokens=16, columns=256, splits=1, stages=3, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=1, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=1, stages=3, warps=4, early=512),
    },
    (8192, 14336, False): {
        1: Gemv(rows=8, columns=2048, warps=4),
        16: Skinny(rows=64, tokens=16, columns=256, splits=1, stages=3, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=2, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=2, stages=3, warps=4, early=512),
    },
    (64128, 8192, False): {
        1: Gemv(rows=4, columns=4096, warps=4),
        16: Skinny(rows=64, tokens=16, columns=128, splits=1, stages=4, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=1, stages=4, warps=4, early=512),
        64: Skinny(rows=128, tokens=64, columns=64, splits=1, stages=4, warps=4, early=512),
    },
}
"""The measured tiles by shape and by maximum number of tokens; the tile for 1 is used for exactly one token."""

STREAMED_TOKENS: dict[tuple[int, int], int] = {
    (6144, 4096): 16,
    (4096, 4096): 32,
    (28672, 4096): 64,
    (4096, 14336): 32,
    (128256, 4096): 64,
    (4096, 1024): 16,
    (1024, 2048): 32,
    (6144, 1024): 16,
    (1024, 3072): 32,
    (151936, 1024): 32,
    (3072, 2048): 16,
    (2048, 2048): 32,
    (16384, 2048): 128,
    (2048, 8192): 32,
    (128256, 2048): 64,
    (3072, 4096): 16,
    (4096, 2048): 16,
    (14336, 4096): 1,
    (4096, 7168): 32,
    (64128, 4096): 64,
    (5120, 8192): 1,
    (8192, 4096): 16,
    (28672, 8192): 1,
    (8192, 14336): 64,
    (64128, 8192): 64,
}
"""For (rows, columns) of a weight: the maximum number of tokens for which the streaming product is faster than cuBLAS.

The time of cuBLAS includes the kernels that the streaming product makes unnecessary, such as the norm.
"""
