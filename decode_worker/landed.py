"""A launch whose tokens are here: who must be looked at, and what the routers hear of all others."""

from collections.abc import Sequence
from dataclasses import dataclass

from decode_worker.cohort import Cohort
from decode_worker.request import DecodeRequest
from wire.messages import RoutedTokens


@dataclass(frozen=True, slots=True)
class Landed:
    """Asked for all it knows before the next step is planned."""

    number: int
    cohort: Cohort
    token_ids: Sequence[int]
    special: Sequence[int]
    """Rows whose token may be the last, or of which there is more to tell, ascending."""
    silent: set[int]
    """These, and the rows of requests that were over before."""

    def token(self, row: int) -> tuple[DecodeRequest, int, int]:
        """Whose it is, its number in the answer, and the token."""
        return self.cohort.seats[row].request, self.cohort.index(row, self.number), self.token_ids[row]

    def usual(self) -> list[RoutedTokens]:
        """The tokens of all others, by router."""
        return self.cohort.tokens(self.number, self.token_ids, self.silent)
