"""Rows that verify draft tokens, as a batch with speculative decoding builds them."""

from collections.abc import Sequence

from decode_worker.drafting_batch import RowsWithDrafts
from decode_worker.drafts import RowDrafts, StepDrafts
from tandem.engine.speculation.proposer import DraftSource, ProposerName
from tandem.engine.steps.batch import StepRow, TokenRows

_SOURCE = DraftSource(ProposerName.NGRAM, 1)


def with_drafts(newest: Sequence[StepRow], drafts: Sequence[Sequence[int]]) -> TokenRows:
    """Return one row of one token per request, followed by the rows of all their draft tokens."""
    rows, row_drafts, first = TokenRows.of(newest), [], len(newest)
    for row, tokens in enumerate(drafts):
        if tokens:
            row_drafts.append(RowDrafts(row, tokens, _SOURCE, first))
            first += len(tokens)
    return RowsWithDrafts(rows, StepDrafts(row_drafts), 0) if row_drafts else rows
