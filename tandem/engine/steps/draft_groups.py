"""Draft groups: the rows of one request in a verification step, and which of its draft tokens are accepted.

Attention reads the KV of a group only once. A compiled loop fills the table of groups, as it does the other sections of
a step (`tandem/engine/steps/step_buffer.py`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tandem.engine.kernels.cpu.compiled_cache import cached_entry
from tandem.engine.steps.batch import TokenRows
from tandem.engine.steps.step_buffer import Narrow, Words

DRAFTS_MAX = 7
"""Maximum number of draft tokens of one request in a step."""
FIELDS = 3
"""The number of integers in an entry of the table; see `tandem.engine.kernels.base.DraftGroups.table`."""


class DraftGroupSizes(NamedTuple):
    """The size of a table of draft groups."""

    groups: int
    rows: int
    """Maximum number of rows in a group."""

    @property
    def words(self) -> int:
        """The size of the table in 8-byte words."""
        return (FIELDS * (self.groups + 1) + 1) // 2


def groups_needed(requests: int, tokens: int, rows: int) -> int:
    """Return the maximum number of groups that `requests` requests with `tokens` rows in total can have.

    A group has up to `rows` rows.
    """
    return requests + (tokens - requests) // rows


def fill_draft_groups(batch: TokenRows, sizes: DraftGroupSizes, words: Words) -> None:
    """Write the table of a batch's draft groups into `words` [sizes.words].

    The batch has the rows of all requests' newest tokens first, then the rows of draft tokens, ordered by request and
    by position. The row of a draft token has the slot of its request.
    """
    table = words.view(np.int32)[: FIELDS * (sizes.groups + 1)].reshape(-1, FIELDS)
    _fill(batch.columns.slot_indices, len(batch.newest), sizes.rows, table)


def fill_chains(batch: TokenRows, chains: int, into: Narrow) -> None:
    """Write starts, order and places of `RowChains` into `into` [chains + 1 + 2 · tokens].

    The batch is that of `fill_draft_groups`. Requests after those of the batch have no rows.
    """
    slots, requests, tokens = batch.columns.slot_indices, len(batch.newest), (len(into) - chains - 1) // 2
    starts, order, places = np.split(into, [chains + 1, chains + 1 + tokens])
    request_of_slot = np.zeros(int(slots.max(initial=0)) + 1, dtype=np.intp)
    request_of_slot[slots[:requests]] = np.arange(requests)
    request = request_of_slot[slots]
    starts[0], starts[1:] = 0, len(slots)
    starts[1 : requests + 1] = np.bincount(request, minlength=requests).cumsum()
    order[: len(slots)] = np.argsort(request, kind="stable")
    order[len(slots) :] = np.arange(len(slots), tokens)
    places[order] = np.arange(tokens)


def accepted_drafts(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Return the number of accepted draft tokens of a request.

    A draft token is accepted if all draft tokens before it are, and if it equals the token that the row before its own
    row sampled. `drawn` has the tokens that the request's rows sampled, the row of its newest token first.
    """
    return next((count for count, draft in enumerate(drafts) if draft != drawn[count]), len(drafts))


def accepted_in(batch: TokenRows, drawn: Sequence[int]) -> list[int]:
    """Return the number of accepted draft tokens of each request, whose rows sampled the tokens `drawn`.

    The batch is that of `fill_draft_groups`.
    """
    columns, requests = batch.columns, len(batch.newest)
    slots, token_ids = columns.slot_indices.tolist(), columns.token_ids.tolist()
    accepted, end = [], requests
    for request in range(requests):
        first = end
        while end < len(slots) and slots[end] == slots[request]:
            end += 1
        accepted.append(accepted_drafts(token_ids[first:end], [drawn[request], *drawn[first:end]]))
    return accepted


def _fill_groups(slots, requests, rows, table):  # type: ignore[no-untyped-def]
    """Write groups of up to `rows` rows into table [groups + 1, FIELDS] int32.

    `slots` [n] int64 are the slots of all rows. The first `requests` rows have the requests' newest tokens, the others
    have draft tokens.
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
            # The next group of the request begins with its next draft row: number `follow` - 1 once `follow` is
            # advanced.
            follow += some
            first, left, group = follow - 1, left - some, group + 1
        follow = end
    table[group:] = 0
    table[-1, 0] = len(slots)


_fill: Any = cached_entry(_fill_groups, nogil=False)
