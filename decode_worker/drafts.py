"""The drafts of one step: guesses for the tokens that follow, verified by further rows of the same requests.

A request with k drafts has k + 1 rows in the step: its newest token, and each draft at the position behind. Each row
draws the token that follows, with its own index in the seeded sequence. A draft is accepted while it equals the token
that the row before it drew; every token of an answer is therefore the target model's own draw, whatever was drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.steps.batch import RowColumns
from engine.steps.draws import Draws


@dataclass(frozen=True, slots=True)
class RowDrafts:
    """The drafts of one row of a step."""

    row: int
    """The row of the request's newest token."""
    token_ids: Sequence[int]
    """At least one."""
    match: int
    """The class of the guess, see `engine.speculation.proposer.Draft`."""


class StepDrafts:
    """The drafts of a step whose first `rows` rows are those of the newest tokens; one row for each draft follows."""

    def __init__(self, rows: int, drafts: Sequence[RowDrafts]) -> None:
        """`drafts` are at most one for each row."""
        self.drafts = drafts
        counts = [len(each.token_ids) for each in drafts]
        self._rows = rows
        self._first = (rows + np.cumsum([0, *counts[:-1]])).tolist() if drafts else []
        """The row of the first draft of each of `drafts`."""
        self.base_rows: NDArray[np.intp] = np.repeat([each.row for each in drafts], counts).astype(np.intp)
        """[drafts]: for each draft, the row of its request's newest token."""
        self.distances: NDArray[np.int64] = np.concatenate([np.arange(1, count + 1) for count in (*counts, 0)])
        """[drafts]: for each draft, the number of positions behind that token, from 1."""

    def __len__(self) -> int:
        """Return the number of drafts, which is the number of further rows."""
        return len(self.base_rows)

    def extend(self, columns: RowColumns) -> RowColumns:
        """Return `columns` with a row for each draft behind them."""
        base, distances = self.base_rows, self.distances
        starts = columns.position_offset[base] + distances
        return RowColumns(
            np.concatenate((columns.token_ids, [token for each in self.drafts for token in each.token_ids])),
            np.concatenate((columns.position_offset, starts)),
            columns.step,
            np.concatenate((columns.sources, np.full(len(self), -1, dtype=columns.sources.dtype))),
            np.concatenate((columns.slot_indices, columns.slot_indices[base])),
            columns.table,
            columns.page_counts,
            max(columns.longest, int(starts.max()) + columns.step + 1),
            self._draws(columns.draws),
        )

    def runs(self, token_ids: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Return each row with drafts and the tokens that it gains, from what all rows of the step drew.

        They are the draw of the row itself and, while the draft equals the draw before it, the draw that follows it.
        """
        found = []
        for drafts, first in zip(self.drafts, self._first, strict=True):
            run = [token_ids[drafts.row]]
            for index, draft in enumerate(drafts.token_ids, first):
                if draft != run[-1]:
                    break
                run.append(token_ids[index])
            found.append((drafts.row, run))
        return found

    def rows_of(self, row: int, tokens: int) -> list[int]:
        """Return the rows that drew the first `tokens` tokens of a row's run."""
        for drafts, first in zip(self.drafts, self._first, strict=True):
            if drafts.row == row:
                return [row, *range(first, first + tokens - 1)]
        return [row]

    def _draws(self, draws: Draws) -> Draws:
        """Return the draws of the step's rows: as those of the newest tokens, further in their sequences."""
        base = self.base_rows
        rows = base.tolist()
        return Draws(
            [*draws.samplings, *(draws.samplings[row] for row in rows)],
            [*draws.histories, *(draws.histories[row] for row in rows)],
            np.concatenate((draws.settings, draws.settings[base])),
            np.concatenate((draws.starts, draws.starts[base])),
            np.concatenate((draws.indices, draws.indices[base] + self.distances)),
            draws.greedy,
            draws.penalized,
            draws.scored,
            draws.may_not_end,
        )
