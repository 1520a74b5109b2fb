"""Incarnation numbers of processes: each number is greater than all earlier ones and does not depend on a clock."""

import secrets

_RANDOM_BITS, _COUNT_BITS = 24, 20
"""The widths in bits of the random part and of the count in a 64-bit number; the other bits are the generation."""


class Incarnations:
    """The source of incarnation numbers of one controller.

    Workers may outlive the controller, and their later incarnations need greater numbers: the next controller therefore
    begins a greater `generation`. The lowest bits are random, so that unrelated clusters that share a token use
    different numbers.
    """

    def __init__(self) -> None:
        self._order = 0

    def begin(self, generation: int) -> None:
        """Begin a generation: all later numbers are greater than those of earlier generations."""
        self._order = generation << _COUNT_BITS

    def next(self) -> int:
        """Return the incarnation number of a process that is about to start."""
        self._order += 1
        return self._order << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)


def generation_of(incarnation: int) -> int:
    """Return the generation of an incarnation number."""
    return incarnation >> (_COUNT_BITS + _RANDOM_BITS)
