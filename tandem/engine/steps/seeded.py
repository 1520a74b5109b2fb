"""The random numbers of seeded sampling: splitmix64 (Steele et al. 2014), evaluated at any index.

A number of a seed's sequence is computed without the numbers before it.
"""

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNUSED_BITS = 11
"""The number of bits, of 64, that are dropped, because a float64 has a mantissa of 53 bits."""


def start_of(seed: int) -> int:
    """Return the start of a seed's sequence, 0 .. 2**64 - 1; it is the input of `uniforms`."""
    return _mix(seed & _MASK)


def uniform(seed: int, index: int) -> float:
    """Return the number at `index` in the sequence of `seed`, in [0, 1)."""
    return (_mix(start_of(seed) + (index + 1) * _GOLDEN) >> _UNUSED_BITS) * 2.0**-53


def uniforms(starts: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the results of `uniform` as an array [n], given `start_of` each seed [n] and the indices [n]."""
    value = starts + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_FIRST)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_SECOND)
    value ^= value >> np.uint64(31)
    numbers: NDArray[np.float64] = (value >> np.uint64(_UNUSED_BITS)) * 2.0**-53
    return numbers


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)
