"""The buffer of a step: where its sections lie, and the loop that fills them for rows of one token each.

The loop is compiled. As operations on arrays it was some thirty calls a step, each of which finds its way through numpy
anew: where ten milliseconds have passed since the last step, nearly all of that is to fetch code. Python's lock is kept
meanwhile, because whoever takes it makes the step wait for much longer than the loop takes.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.kernels.cpu.compiled_cache import cached_entry

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


FINE = -1
SHORT_OF_PAGES, WRONG_TOKEN, WRONG_PAGE = range(3)
"""What is wrong with a row."""
_FAULTS = 3


def fault_of(found: int) -> tuple[int, int]:
    """What `fill_rows` found, unless it was FINE → what is wrong, and with which row."""
    return found % _FAULTS, found // _FAULTS


def _fill_rows(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a compiled function has no others
    words, at, shift, number, token_ids, sources, drawn_before, places, table, held, end, width, limits
):
    """Fill `words` [int64], whose sections begin at `at` (`StepSizes.starts`), for n rows and, behind them, rows up to
    `end` that read and write nothing; the page table is `width` wide.

    shift [n] int64: positions, less `number`; token_ids [n] int64; sources [n] int32, of the rows of the step before;
    drawn_before int64: the draw of each of those, empty = its own number; places [n]: where each row's pages are in
    table [places, pages] int32, and in held [places] int32 how many there are. limits [3] int64: tokens of a page, size
    of the vocabulary, pages of the cache.

    → FINE, or what is wrong with the last row that anything is wrong with.
    """
    page_tokens, vocab_size, pages = limits[0], limits[1], limits[2]
    narrow = words[at[3] :].view(np.int32)
    ids, slots, drawn = words[at[0] :], words[at[1] :], words[at[2] :]
    positions, from_rows, row_starts = narrow[at[4] :], narrow[at[5] :], narrow[at[6] :]
    contexts, into = narrow[at[7] :], narrow[at[8] :]
    found = FINE
    for row in range(len(shift)):
        place = places[row]
        position, has = shift[row] + number, held[place]
        page = position // page_tokens
        if position < 0 or page >= has:
            return row * _FAULTS + SHORT_OF_PAGES
        if token_ids[row] < 0 or token_ids[row] >= vocab_size:
            found = row * _FAULTS + WRONG_TOKEN
        source = sources[row]
        ids[row] = token_ids[row]
        slots[row] = (table[place, page] - page) * page_tokens + position
        drawn[row] = row
        positions[row] = position
        from_rows[row] = drawn_before[source] if source >= 0 and len(drawn_before) else source
        row_starts[row] = row
        contexts[row] = position + 1
        used, first, wrong = min(width, has), row * width, 0
        for index in range(used):
            held_page = table[place, index]
            wrong |= held_page < 0 or held_page >= pages
            into[first + index] = held_page
        into[first + used : first + width] = 0
        if wrong:
            found = row * _FAULTS + WRONG_PAGE
    for row in range(len(shift), end):
        ids[row] = positions[row] = contexts[row] = 0
        slots[row] = from_rows[row] = -1
        row_starts[row] = row
    into[len(shift) * width : end * width] = 0
    row_starts[end] = end
    return found


fill_rows: Any = cached_entry(_fill_rows, nogil=False)
