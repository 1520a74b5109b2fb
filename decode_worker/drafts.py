"""The drafts of one step: guessed tokens, each one draft, that further rows of the same requests verify.

A request with k drafts has k + 1 rows in the step: its newest token, and each draft at the position behind. Each row
draws the token that follows, with its own index in the seeded sequence. A draft is accepted while it equals the token
that the row before it drew; every token of an answer is therefore the target model's own draw, whatever was drafted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from decode_worker.batch_snapshot import DecodedStep
from decode_worker.request import DecodeRequest
from tandem.engine.speculation.proposer import DraftSource
from tandem.engine.steps.batch import FROM_HOST, RowColumns
from tandem.engine.steps.sampling_metadata import SamplingMetadata
from tandem.protocol.messages import RoutedTokens, StepTokens


class RowDrafts(NamedTuple):
    """The drafts of one row of a step."""

    row: int
    """The row of the request's newest token."""
    token_ids: Sequence[int]
    """At least one."""
    source: DraftSource
    first: int
    """The row of the first draft; the others follow."""


class StepDrafts:
    """The drafts of a step whose first rows are those of the newest tokens; one row for each draft follows."""

    def __init__(self, drafts: Sequence[RowDrafts]) -> None:
        """`drafts` [at least 1] are at most one for each row, in the order of their rows."""
        self.drafts = drafts
        base = [each.row for each in drafts for _ in each.token_ids]
        self._token_ids = np.array([token for each in drafts for token in each.token_ids], dtype=np.int64)
        self.base_rows: NDArray[np.intp] = np.array(base, dtype=np.intp)
        """[drafts]: for each draft, the row of its request's newest token."""
        distances = [distance for each in drafts for distance in range(1, len(each.token_ids) + 1)]
        self.distances: NDArray[np.int64] = np.array(distances, dtype=np.int64)
        """[drafts]: for each draft, the number of positions behind that token, from 1."""

    def __len__(self) -> int:
        """Return the number of drafts, which is the number of further rows."""
        return len(self.base_rows)

    def extend(self, columns: RowColumns) -> RowColumns:
        """Return `columns` with a row for each draft behind them."""
        requests = len(columns.token_ids)
        rows = np.concatenate((np.arange(requests), self.base_rows))
        further = np.concatenate((np.zeros(requests, dtype=np.int64), self.distances))
        starts = columns.position_offset[rows] + further
        return columns._replace(
            token_ids=np.concatenate((columns.token_ids, self._token_ids)),
            position_offset=starts,
            sources=np.full(len(rows), FROM_HOST, dtype=np.int32),
            slot_indices=columns.slot_indices[rows],
            longest=int(starts.max()) + columns.step + 1,
            draws=self._draws(columns.draws, rows, further),
        )

    def runs(self, token_ids: Sequence[int]) -> list[tuple[RowDrafts, list[int]]]:
        """Return the drafts of each row and the tokens that it gains, from what all rows of the step drew.

        They are the draw of the row itself and, while the draft equals the draw before it, the draw that follows it.
        """
        found = []
        for drafts in self.drafts:
            run = [token_ids[drafts.row]]
            for index, draft in enumerate(drafts.token_ids, drafts.first):
                if draft != run[-1]:
                    break
                run.append(token_ids[index])
            found.append((drafts, run))
        return found

    def _draws(self, draws: SamplingMetadata, rows: NDArray[np.intp], further: NDArray[np.int64]) -> SamplingMetadata:
        """Return the draws of all rows: drafts have those of their requests, further in the sequences."""
        numbers = rows.tolist()
        return SamplingMetadata(
            [draws.samplings[row] for row in numbers],
            [draws.histories[row] for row in numbers],
            draws.settings[rows],
            draws.starts[rows],
            draws.indices[rows] + further,
            draws.greedy,
            draws.looks_back,
            draws.scored,
            draws.masked,
        )


class VerifiedRow(NamedTuple):
    """What became of the drafts of one row."""

    drafts: RowDrafts
    token_ids: Sequence[int]
    """The tokens that the request gained, up to the end of its answer: one more than drafts were accepted."""


@dataclass(frozen=True, slots=True)
class VerifiedStep(DecodedStep):
    """The tokens of a step with drafts."""

    verified: Mapping[int, VerifiedRow] = field(default_factory=dict)
    """Rows that had drafts, but for those of requests that were over before."""

    def tokens(self, row: int) -> tuple[DecodeRequest, int, Sequence[int]]:
        """See `DecodedStep`."""
        request, index, token_ids = DecodedStep.tokens(self, row)
        return request, index, self.verified[row].token_ids if row in self.verified else token_ids

    def rows_of(self, row: int) -> Sequence[int]:
        """See `DecodedStep`."""
        if row not in self.verified:
            return (row,)
        found = self.verified[row]
        return [row, *range(found.drafts.first, found.drafts.first + len(found.token_ids) - 1)]

    def plain_tokens(self) -> list[RoutedTokens]:
        """See `DecodedStep`."""
        runs = [
            self.verified[row].token_ids if row in self.verified else (token,)
            for row, token in enumerate(self.token_ids)
        ]
        found = []
        for routed in self.snapshot.tokens(self.step, range(len(runs)), self.excluded_rows):
            # The columns were made with the numbers of the rows instead of tokens.
            some = [runs[row] for row in routed.tokens.token_ids]
            columns = routed.tokens
            tokens = StepTokens(
                columns.request_ids,
                columns.attempts,
                columns.indices,
                list(chain.from_iterable(some)),
                tuple(map(len, some)),
            )
            found.append(RoutedTokens(routed.router_id, tokens))
        return found
