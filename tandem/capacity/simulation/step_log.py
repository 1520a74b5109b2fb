"""The end times of a worker's steps, from which the times of all its tokens follow."""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class StepLog:
    """End times of steps in seconds, ascending; steps count from 0."""

    def __init__(self) -> None:
        self._ends = array("d")

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, end_s: float) -> int:
        """Adds a step; returns its number."""
        self._ends.append(end_s)
        return len(self._ends) - 1

    def extend(self, ends_s: NDArray[np.float64]) -> None:
        """Adds several steps."""
        self._ends.frombytes(ends_s.tobytes())

    def ends(self, first: int, count: int) -> Sequence[float]:
        """Returns the end times of `count` steps from `first` on."""
        return self._ends[first : first + count]
