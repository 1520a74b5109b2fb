"""Numbers of processes: each is new, and above those of all earlier ones, whatever any clock says."""

import secrets

_RANDOM_BITS, _COUNT_BITS = 24, 20
"""Of 64; the others are the generation's."""


class Incarnations:
    """Given out by whoever starts processes. Workers that outlive it take higher numbers for later processes, so its
    successor goes on above, by a `generation` that is greater than all before it.

    The lowest bits are drawn, so that clusters that know nothing of each other, but share a token, use different ones.
    """

    def __init__(self) -> None:
        self._order = 0

    def begin(self, generation: int) -> None:
        """Whatever comes from now on is above all numbers of earlier generations."""
        self._order = generation << _COUNT_BITS

    def next(self) -> int:
        """Of a process that is about to start."""
        self._order += 1
        return self._order << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)


def generation_of(incarnation: int) -> int:
    """The one in which this number was given out."""
    return incarnation >> (_COUNT_BITS + _RANDOM_BITS)
