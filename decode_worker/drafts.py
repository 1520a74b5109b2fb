"""The draft tokens of one step, which are verified in additional rows of the same requests.

A request with k draft tokens has k + 1 rows in the step: one for its newest token, and one for each draft token at the
next positions. Each row samples the token that follows its input token, with its own index in the request's random
sequence. A draft token is accepted if it equals the token that the row before it sampled and all draft tokens before it
are accepted. Every token of an answer is therefore sampled from the target model, whatever the draft was.
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
from tandem.engine.steps.draft_groups import accepted_drafts
from tandem.engine.steps.sampling_metadata import SamplingMetadata
from tandem.protocol.messages import RoutedTokens, StepTokens


class RowDrafts(NamedTuple):
    """The draft tokens of one request in a step."""

    row: int
    """The row of the request's newest token."""
    token_ids: Sequence[int]
    """The draft tokens; at least one."""
    source: DraftSource
    first: int
    """The row of the first draft token; the others follow."""


class StepDrafts:
    """The draft tokens of a step. Their rows come after the rows of the newest tokens."""

    def __init__(self, drafts: Sequence[RowDrafts]) -> None:
        """Store the drafts of a step: at least one, at most one per row, in row order."""
        self.drafts = drafts
        base = [row_drafts.row for row_drafts in drafts for _ in row_drafts.token_ids]
        self._token_ids = np.array([token for row_drafts in drafts for token in row_drafts.token_ids], dtype=np.int64)
        self.base_rows: NDArray[np.intp] = np.array(base, dtype=np.intp)
        """[draft tokens]: the row of the newest token of each draft token's request."""
        distances = [distance for row_drafts in drafts for distance in range(1, len(row_drafts.token_ids) + 1)]
        self.distances: NDArray[np.int64] = np.array(distances, dtype=np.int64)
        """[draft tokens]: the number of positions from the request's newest token to each draft token, at least 1."""

    def __len__(self) -> int:
        """Return the number of draft tokens, which is the number of additional rows."""
        return len(self.base_rows)

    def extend(self, columns: RowColumns) -> RowColumns:
        """Return `columns` followed by a row for each draft token."""
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
        """Return for each request its draft tokens and the tokens that it gains; `token_ids` has the token of each row.

        A request gains the token sampled by the row of its newest token, and the tokens sampled by the rows of its
        accepted draft tokens.
        """
        runs = []
        for drafts in self.drafts:
            drawn = [token_ids[drafts.row], *token_ids[drafts.first : drafts.first + len(drafts.token_ids)]]
            runs.append((drafts, drawn[: 1 + accepted_drafts(drafts.token_ids, drawn)]))
        return runs

    def _draws(self, draws: SamplingMetadata, rows: NDArray[np.intp], further: NDArray[np.int64]) -> SamplingMetadata:
        """Return the sampling input of all rows, given the sampling input of the requests' own rows.

        The row of a draft token has the settings of its request, and a later index in the request's random sequence.
        """
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
    """The verification result of one request's draft tokens."""

    drafts: RowDrafts
    token_ids: Sequence[int]
    """The tokens that the request gained: the accepted draft tokens and one more, cut at the end of the answer."""


@dataclass(frozen=True, slots=True)
class VerifiedStep(DecodedStep):
    """A completed step with draft tokens, and the tokens that its requests gained."""

    verified: Mapping[int, VerifiedRow] = field(default_factory=dict)
    """The verification result of each row that had draft tokens, by row.

    Rows of requests that ended before this step completed are left out.
    """

    def tokens(self, row: int) -> tuple[DecodeRequest, int, Sequence[int]]:
        """Return a row's request, the answer index of the first token that it gained in this step, and these tokens."""
        request, index, token_ids = DecodedStep.tokens(self, row)
        return request, index, self.verified[row].token_ids if row in self.verified else token_ids

    def rows_of(self, row: int) -> Sequence[int]:
        """Return the rows of this step that sampled the tokens of the request in row `row`."""
        if row not in self.verified:
            return (row,)
        verified_row = self.verified[row]
        return [row, *range(verified_row.drafts.first, verified_row.drafts.first + len(verified_row.token_ids) - 1)]

    def plain_tokens(self) -> list[RoutedTokens]:
        """Return the tokens of all rows that are not in `excluded_rows`, grouped by router."""
        runs = [
            self.verified[row].token_ids if row in self.verified else (token,)
            for row, token in enumerate(self.token_ids)
        ]
        routed_tokens = []
        for routed in self.snapshot.tokens(self.step, range(len(runs)), self.excluded_rows):
            # The snapshot grouped the row numbers by router; here each number is replaced by its row's tokens.
            some = [runs[row] for row in routed.tokens.token_ids]
            columns = routed.tokens
            tokens = StepTokens(
                columns.request_ids,
                columns.attempts,
                columns.indices,
                list(chain.from_iterable(some)),
                tuple(map(len, some)),
            )
            routed_tokens.append(RoutedTokens(routed.router_id, tokens))
        return routed_tokens
