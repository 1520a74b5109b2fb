"""Rows of one token each, written into a step's buffer in one compiled loop.

As operations on arrays these were some thirty a step, each of which finds its way through numpy anew: where ten
milliseconds have passed since the last step, nearly all of that is to fetch code. Python's lock is kept meanwhile, as
whoever takes it makes the step wait for much longer than this takes.
"""

from typing import Any

import numpy as np

from engine.kernels.cpu_cache import cached_entry

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
