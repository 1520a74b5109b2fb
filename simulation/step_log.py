"""When each step of a worker ended: where the moments of all its tokens are."""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class StepLog:
    """Steps count from 0; moments in seconds, ascending."""

    def __init__(self) -> None:
        self._ends = array("d")

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, end_s: float) -> int:
        """One more step → its number."""
        self._ends.append(end_s)
        return len(self._ends) - 1

    def extend(self, ends_s: NDArray[np.float64]) -> None:
        """Several more."""
        self._ends.frombytes(ends_s.tobytes())

    def ends(self, first: int, count: int) -> Sequence[float]:
        """Of `count` steps from `first` on."""
        return self._ends[first : first + count]
