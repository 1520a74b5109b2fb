"""The buffer of a step: the layout of its sections, and the compiled loop that fills them for rows of one token.

The loop is compiled because NumPy needs about thirty calls per step for the same work. In a step that starts ten
milliseconds after the last one, the CPU spends nearly all of the time of these calls on fetching their code. The loop
keeps the GIL, because another thread that took the GIL would delay the step for much longer than the loop runs.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.engine.kernels.cpu.compiled_cache import cached_entry
from tandem.protocol.errors import Internal
from tandem.protocol.kv_pages import STATE, first_page

Words = npt.NDArray[np.int64]
Narrow = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The bounds against which rows are checked; a row outside them would access memory of other requests."""

    vocab_size: int
    max_context: int
    pages: int
    page_tokens: int
    windows: tuple[int | None, ...] = (None,)
    """The window of each group of layers that share pages (`KvPages.windows`); groups of state layers come last."""

    @property
    def groups(self) -> int:
        """The number of groups of layers that share pages."""
        return len(self.windows)

    @property
    def state_groups(self) -> int:
        """The number of groups of state layers."""
        return self.windows.count(STATE)

    @property
    def row_limits(self) -> Words:
        """The limits as the array that `fill_rows` expects."""
        windows = (window or 0 for window in self.windows if window != STATE)
        return np.array([self.page_tokens, self.vocab_size, self.pages, self.state_groups, *windows])

    def first_page(self, group: int, position: int) -> int:
        """Return the number of the first page that a token at `position` attends to in this group."""
        return first_page(self.windows[group], position, self.page_tokens)

    def sizes(self, tokens: int, rows: int, width: int, drawn: int, verifying: int = 0) -> "StepSizes":
        """Return the sizes of a step of a model with these groups of layers.

        `verifying` is the number of requests in a step that verifies draft tokens; 0 = it verifies none.
        """
        states = self.state_groups
        return StepSizes(tokens, rows, width, drawn, self.groups - states, states, verifying if states else 0)

    def pages_of(self, context: int) -> int:
        """Return the number of pages that a context of `context` tokens needs."""
        return -(-context // self.page_tokens)

    def wrong_token(self) -> Internal:
        """Return the error for a token id outside the vocabulary."""
        return Internal(f"A token id is outside 0 .. {self.vocab_size - 1}.")

    def wrong_page(self) -> Internal:
        """Return the error for a page id outside the cache."""
        return Internal(f"A page id is outside 0 .. {self.pages - 1}.")


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The lengths of the buffer's sections, in elements.

    The sections in order: int64 token_ids, slots, drawn; int32 positions, sources, row starts, contexts, page table,
    adapters, state pages, chains. Each section begins at a multiple of 16 bytes, because Triton would compile kernels
    again for other alignments. Slots and page table have one part for each group with KV, and the state pages one for
    each group of state layers, padded to a multiple of 16 bytes as well. The chains are the tensors of `RowChains`.
    """

    tokens: int
    rows: int
    width: int
    """The number of entries in each row of the page table of a group."""
    drawn: int
    groups: int = 1
    """The number of groups of layers with KV."""
    states: int = 0
    """The number of groups of state layers."""
    chains: int = 0
    """The number of requests in a step of a model with state layers that verifies draft tokens; else 0."""

    @property
    def group_slots(self) -> int:
        """The stride between the slot sections of adjacent KV groups, in int64 elements; a multiple of 16 bytes."""
        return -(-self.tokens // 2) * 2

    @property
    def group_table(self) -> int:
        """The stride between the page tables of adjacent KV groups, in int32 elements; a multiple of 16 bytes."""
        return -(-self.rows * self.width // 4) * 4

    @property
    def group_states(self) -> int:
        """The stride between the state pages of adjacent groups of state layers, in int32 elements, like the others."""
        return -(-self.rows // 2) * 4

    @property
    def int64_sections(self) -> list[int]:
        """The lengths of the int64 sections without padding, in elements."""
        return [self.tokens, self.groups * self.group_slots, self.drawn]

    @property
    def int32_sections(self) -> list[int]:
        """The lengths of the int32 sections without padding, in elements."""
        table, states = self.groups * self.group_table, self.states * self.group_states
        chains = self.chains + 1 + 2 * self.tokens if self.chains else 0
        return [self.tokens, self.tokens, self.rows + 1, self.rows, table, self.tokens, states, chains]

    @property
    def int64_capacity(self) -> list[int]:
        """The space of each int64 section, including padding up to the next section, in elements."""
        return [-(-length // 2) * 2 for length in self.int64_sections]

    @property
    def int32_capacity(self) -> list[int]:
        """The space of each int32 section, including padding up to the next section, in elements."""
        return [-(-length // 4) * 4 for length in self.int32_sections]

    @property
    def words(self) -> int:
        """The length of the whole buffer, in int64 elements."""
        return bounds_of(self).words

    @property
    def starts(self) -> Words:
        """[14]: the starts of all sections, and the strides between the groups' parts; see `_Bounds.starts`."""
        return bounds_of(self).starts


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The range of each section in the buffer, in elements of the section's dtype."""

    token_ids: slice
    slots: slice
    drawn: slice
    positions: slice
    sources: slice
    row_starts: slice
    contexts: slice
    table: slice
    adapters: slice
    states: slice
    chains: slice
    """The starts, order and places of `RowChains`."""
    int32_start: int
    """The start of the int32 sections, which follow the int64 sections, in int64 elements."""
    words: int
    starts: Words
    """The starts of token_ids, slots and drawn, `int32_start`, and the start of each int32 section but the chains.

    The starts of int32 sections are in int32 elements, the other starts in int64 elements. The last three entries are
    `StepSizes.group_slots`, `StepSizes.group_table` and `StepSizes.group_states`.
    """


@lru_cache(maxsize=256)
def bounds_of(sizes: StepSizes) -> _Bounds:
    """Return the range of each section of a buffer of `sizes`.

    The result is cached, because it is needed in each step, and most steps have the same sizes.
    """
    int64_sections, int32_sections = sizes.int64_capacity, sizes.int32_capacity
    token_ids, slots, drawn = _slices(int64_sections, sizes.int64_sections)
    positions, sources, row_starts, contexts, table, adapters, states, chains = _slices(
        int32_sections, sizes.int32_sections
    )
    begin = sum(int64_sections)
    words = begin + sum(int32_sections) // 2
    sections = token_ids, slots, drawn, positions, sources, row_starts, contexts, table, adapters, states
    starts = [section.start for section in sections]
    strides = sizes.group_slots, sizes.group_table, sizes.group_states
    return _Bounds(*sections, chains, begin, words, np.array([*starts[:3], begin, *starts[3:], *strides]))


def _slices(capacities: list[int], lengths: list[int]) -> list[slice]:
    ends = accumulate(capacities)
    return [slice(end - size, end - size + length) for end, size, length in zip(ends, capacities, lengths, strict=True)]


OK = -1
SHORT_OF_PAGES, WRONG_TOKEN, WRONG_PAGE = range(3)
"""The errors that `fill_rows` reports: too few pages, a wrong token id, and a wrong page id."""
_FAULTS = 3


def decode_error(code: int) -> tuple[int, int]:
    """Return the error and the row number that a result of `fill_rows` encodes; the result must not be OK."""
    return code % _FAULTS, code // _FAULTS


def _fill_rows(  # type: ignore[no-untyped-def]  # noqa: PLR0915, PLR0917 - a compiled function has no others
    words,
    at,
    position_offset,
    step,
    token_ids,
    sources,
    drawn_before,
    slot_indices,
    table,
    page_counts,
    adapters,
    end,
    width,
    limits,
):
    """Write n rows of one token each into `words` [int64], and padding rows up to `end`, which read and write nothing.

    The sections of `words` begin at `at` (`StepSizes.starts`); the page table has `width` columns. Pages outside a
    row's window are not read.

    position_offset [n] int64: the position of each row's token minus `step`
    token_ids       [n] int64
    sources         [n] int32: the row of the previous step that samples the token, -1 if the id is known
    drawn_before    int64: for each row of the previous step, its index among that step's sampling rows; empty if all
                    rows of that step sampled a token
    slot_indices    [n]: the slot of each row in table, page_counts and adapters
    table           [slots, entries] int32: page n of group g is entry n · groups + g
    page_counts     [slots] int32: the number of entries of each slot
    adapters        [slots] int32
    limits          [4 + groups with KV] int64: tokens of a page, size of the vocabulary, pages of the cache, number of
                    groups of state layers, and the window of each group with KV, 0 = none

    Returns OK, or the last error found, encoded for `decode_error`.
    """
    page_tokens, vocab_size, pages, states, windows = limits[0], limits[1], limits[2], limits[3], limits[4:]
    with_kv, group_slots, group_table, group_states = len(windows), at[11], at[12], at[13]
    groups = with_kv + states
    int32_sections = words[at[3] :].view(np.int32)
    ids, slots, drawn = words[at[0] :], words[at[1] :], words[at[2] :]
    positions, from_rows, row_starts = int32_sections[at[4] :], int32_sections[at[5] :], int32_sections[at[6] :]
    contexts, into, adapted = int32_sections[at[7] :], int32_sections[at[8] :], int32_sections[at[9] :]
    state_pages = int32_sections[at[10] :]
    code = OK
    for row in range(len(position_offset)):
        slot = slot_indices[row]
        position, has = position_offset[row] + step, page_counts[slot] // groups
        page = position // page_tokens
        if position < 0 or page >= has:
            return row * _FAULTS + SHORT_OF_PAGES
        if token_ids[row] < 0 or token_ids[row] >= vocab_size:
            code = row * _FAULTS + WRONG_TOKEN
        source = sources[row]
        ids[row] = token_ids[row]
        drawn[row] = row
        positions[row] = position
        from_rows[row] = drawn_before[source] if source >= 0 and len(drawn_before) else source
        row_starts[row] = row
        contexts[row] = position + 1
        adapted[row] = adapters[slot]
        used, wrong = min(width, has), 0
        for group in range(with_kv):
            # The slot is page id · page_tokens + the position within the page.
            slots[group * group_slots + row] = (table[slot, page * groups + group] - page) * page_tokens + position
            first, seen = group * group_table + row * width, 0
            if windows[group] > 0:
                seen = max(0, position - windows[group] + 1) // page_tokens
                # Entries before the window are FREED, so they repeat the first page in the window.
                into[first : first + seen] = table[slot, seen * groups + group]
            for index in range(seen, used):
                held_page = table[slot, index * groups + group]
                wrong |= held_page < 0 or held_page >= pages
                into[first + index] = held_page
            into[first + used : first + width] = 0
        for state in range(states):
            first = state * group_states + 2 * row
            written = table[slot, page * groups + with_kv + state]
            read = -1
            if position > 0:
                read = table[slot, (position - 1) // page_tokens * groups + with_kv + state]
                wrong |= read < 0 or read >= pages
            wrong |= written < 0 or written >= pages
            state_pages[first], state_pages[first + 1] = read, written
        if wrong:
            code = row * _FAULTS + WRONG_PAGE
    for row in range(len(position_offset), end):
        ids[row] = positions[row] = contexts[row] = adapted[row] = 0
        from_rows[row] = -1
        row_starts[row] = row
    for state in range(states):
        state_pages[state * group_states + 2 * len(position_offset) : state * group_states + 2 * end] = -1
    for group in range(with_kv):
        slots[group * group_slots + len(position_offset) : group * group_slots + end] = -1
        into[group * group_table + len(position_offset) * width : group * group_table + end * width] = 0
    row_starts[end] = end
    return code


fill_rows: Any = cached_entry(_fill_rows, nogil=False)
