"""Groups of a step's rows that verify drafts: those of one request, which attention computes together.

Their table is filled by a compiled loop, as the other sections of a step are (`tandem/engine/steps/step_buffer.py`).
"""

from typing import Any, NamedTuple

import numpy as np

from tandem.engine.kernels.cpu.compiled_cache import cached_entry
from tandem.engine.steps.batch import TokenRows
from tandem.engine.steps.step_buffer import Words

FIELDS = 3
"""Numbers of an entry of the table, see `tandem.engine.kernels.base.DraftGroups.table`."""


class DraftGroupSizes(NamedTuple):
    """The size of a table of groups."""

    groups: int
    rows: int
    """The most rows of a group."""

    @property
    def words(self) -> int:
        """The words of 8 bytes that hold the table."""
        return (FIELDS * (self.groups + 1) + 1) // 2


def groups_needed(requests: int, tokens: int, rows: int) -> int:
    """Return the most groups of up to `rows` rows that any `requests` with `tokens` rows in total have."""
    return requests + (tokens - requests) // rows


def fill_draft_groups(batch: TokenRows, sizes: DraftGroupSizes, words: Words) -> None:
    """Write the table of a step's groups into `words` [sizes.words].

    The rows of the requests' newest tokens come first. Behind them come those of the drafts, in the order of the
    requests and of the positions; a draft has the slot of its request.
    """
    table = words.view(np.int32)[: FIELDS * (sizes.groups + 1)].reshape(-1, FIELDS)
    _fill(batch.columns.slot_indices, len(batch.newest), sizes.rows, table)


def _fill_groups(slots, requests, rows, table):  # type: ignore[no-untyped-def]
    """Write groups of up to `rows` rows into table [groups + 1, FIELDS] int32.

    `slots` [n] int64 are those of all rows, of which the first `requests` are the newest tokens'.
    """
    group, follow = 0, requests
    for request in range(requests):
        first, end = request, follow
        while end < len(slots) and slots[end] == slots[request]:
            end += 1
        left = 1 + end - follow
        while left > 0:
            some = min(rows, left)
            table[group, 0], table[group, 1], table[group, 2] = first, follow, some
            # A further group begins with the last draft before `follow` of the next one.
            follow += some
            first, left, group = follow - 1, left - some, group + 1
        follow = end
    table[group:] = 0
    table[-1, 0] = len(slots)


_fill: Any = cached_entry(_fill_groups, nogil=False)
