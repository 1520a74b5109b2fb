"""Where a step's numbers lie in its buffer."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]
Narrow = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How long each section of the buffer is, in elements.

    In order: int64 token_ids, slots, drawn; int32 positions, sources, row starts, contexts, page table. Each begins at
    a multiple of 16 bytes, as kernels are compiled once more for addresses that do not.
    """

    tokens: int
    rows: int
    width: int
    """Pages of the page table's rows."""
    drawn: int

    @property
    def wide(self) -> list[int]:
        return [self.tokens, self.tokens, self.drawn]

    @property
    def narrow(self) -> list[int]:
        return [self.tokens, self.tokens, self.rows + 1, self.rows, self.rows * self.width]

    @property
    def wide_room(self) -> list[int]:
        """Elements from each int64 section's start to the next one's."""
        return [-(-length // 2) * 2 for length in self.wide]

    @property
    def narrow_room(self) -> list[int]:
        """Elements from each int32 section's start to the next one's."""
        return [-(-length // 4) * 4 for length in self.narrow]

    @property
    def words(self) -> int:
        """Of 8 bytes, for all sections."""
        return _bounds(self).words

    @property
    def starts(self) -> Words:
        """[9] of all sections, see `_Bounds`."""
        return _bounds(self).starts


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Where each section of a buffer lies, in its own elements."""

    token_ids: slice
    slots: slice
    drawn: slice
    positions: slice
    sources: slice
    row_starts: slice
    contexts: slice
    table: slice
    wide: int
    """Words before the first of 32 bits."""
    words: int
    starts: Words
    """Where token_ids, slots and drawn begin, the words of 32 bits, and, counted in these, positions, sources, row
    starts, contexts and table.
    """


@lru_cache(maxsize=256)
def _bounds(sizes: StepSizes) -> _Bounds:
    """Asked for in each step, and the same in most of them."""
    wide, narrow = sizes.wide_room, sizes.narrow_room
    token_ids, slots, drawn = _slices(wide, sizes.wide)
    positions, sources, row_starts, contexts, table = _slices(narrow, sizes.narrow)
    begin = sum(wide)
    words = begin + sum(narrow) // 2
    sections = token_ids, slots, drawn, positions, sources, row_starts, contexts, table
    starts = [section.start for section in sections]
    return _Bounds(*sections, begin, words, np.array([*starts[:3], begin, *starts[3:]]))


def _slices(rooms: list[int], lengths: list[int]) -> list[slice]:
    ends = accumulate(rooms)
    return [slice(end - room, end - room + length) for end, room, length in zip(ends, rooms, lengths, strict=True)]


@dataclass(slots=True)
class Sections:
    """Views into one buffer."""

    token_ids: Words
    slots: Words
    drawn: Words
    positions: Narrow
    sources: Narrow
    row_starts: Narrow
    contexts: Narrow
    table: Narrow

    @classmethod
    def of(cls, words: Words, sizes: StepSizes) -> "Sections":
        at = _bounds(sizes)
        narrow = words[at.wide :].view(np.int32)
        return cls(
            words[at.token_ids],
            words[at.slots],
            words[at.drawn],
            narrow[at.positions],
            narrow[at.sources],
            narrow[at.row_starts],
            narrow[at.contexts],
            narrow[at.table].reshape(sizes.rows, sizes.width),
        )
