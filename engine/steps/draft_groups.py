"""Groups of a step's rows that verify drafts: those of one request, which attention computes together."""

from typing import NamedTuple

import numpy as np

from engine.steps.batch import TokenRows
from engine.steps.step_buffer import Words

FIELDS = 3
"""Numbers of an entry of the table, see `engine.kernels.base.DraftGroups.table`."""


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
    slots, requests, rows = batch.columns.slot_indices, len(batch.newest), sizes.rows
    row_of_slot = np.empty(int(slots.max(initial=0)) + 1, dtype=np.int64)
    row_of_slot[slots[:requests]] = np.arange(requests)
    counts = np.bincount(row_of_slot[slots[requests:]], minlength=requests)
    drafts_at = requests + np.cumsum(counts) - counts
    parts = counts // rows + 1
    request = np.repeat(np.arange(requests), parts)
    done = (np.arange(len(request)) - np.repeat(np.cumsum(parts) - parts, parts)) * rows
    follow = drafts_at[request] + done
    table[: len(request), 0] = np.where(done == 0, request, follow - 1)
    table[: len(request), 1] = follow
    table[: len(request), 2] = np.minimum(rows, 1 + counts[request] - done)
    table[len(request) :] = 0
    table[-1, 0] = len(slots)
