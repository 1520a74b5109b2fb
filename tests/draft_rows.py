"""Rows that verify drafts, as a drafting batch makes them."""

from collections.abc import Sequence

from decode_worker.drafting_batch import RowsWithDrafts
from decode_worker.drafts import RowDrafts, StepDrafts
from tandem.engine.steps.batch import StepRow, TokenRows


def with_drafts(newest: Sequence[StepRow], drafts: Sequence[Sequence[int]]) -> TokenRows:
    """Return rows of one token, each of another request, and behind them one row for each of their drafts."""
    rows, found, first = TokenRows.of(newest), [], len(newest)
    for row, tokens in enumerate(drafts):
        if tokens:
            found.append(RowDrafts(row, tokens, 1, first))
            first += len(tokens)
    return RowsWithDrafts(rows, StepDrafts(found), 0) if found else rows
