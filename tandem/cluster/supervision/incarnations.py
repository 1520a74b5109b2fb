"""Incarnation numbers of processes: each is new and above all earlier ones, independent of any clock."""

import secrets

_RANDOM_BITS, _COUNT_BITS = 24, 20
"""The numbers of the 64 bits that are random and that hold the count; the remaining bits hold the generation."""


class Incarnations:
    """The source of incarnation numbers of one controller.

    Later processes of workers that outlive the controller need higher numbers, so its successor continues with a
    `generation` that is greater than all before it. The lowest bits are random, so that unrelated clusters that share a
    token use different numbers.
    """

    def __init__(self) -> None:
        self._order = 0

    def begin(self, generation: int) -> None:
        """Begin a generation: all later numbers are above those of earlier generations."""
        self._order = generation << _COUNT_BITS

    def next(self) -> int:
        """Return the number of a process that is about to start."""
        self._order += 1
        return self._order << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)


def generation_of(incarnation: int) -> int:
    """Return the generation of an incarnation number."""
    return incarnation >> (_COUNT_BITS + _RANDOM_BITS)
