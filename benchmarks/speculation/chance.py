"""Drafts that are accepted by chance: what steps gain for a given rate of acceptance, whatever the model.

With random weights in 16 bits no proposer can know the answer: a step of several rows rounds otherwise than one of a
single row, and of a hundred thousand logits the largest two often lie closer than that. Costs do not depend on the
tokens. Every figure made with these names them.
"""

import random
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from decode_worker.drafts import RowDrafts, StepDrafts
from tandem.engine.speculation.proposer import Draft, DraftSource, ProposerName

CHANCE = DraftSource(ProposerName.NGRAM, 1)
"""The class of all drafts."""


class ChanceProposer:
    """Proposes the same tokens always, as many as are asked for."""

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """See `Proposer`."""

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """See `Proposer`."""

    def propose(self, key: Hashable, most: int) -> Draft:
        """See `Proposer`."""
        return Draft(range(1, most + 1), CHANCE)

    def leave(self, key: Hashable) -> None:
        """See `Proposer`."""


class Chance:
    """Accepts each draft with probability `alpha`, if those before it were."""

    def __init__(self, alpha: float, seed: int = 0) -> None:
        self.alpha = alpha
        """The probability; may change."""
        self._dice = random.Random(seed)

    @contextmanager
    def accepting(self) -> Iterator[None]:
        """Judges drafts by chance within the context, in all workers of this process."""
        chance = self

        def runs(step: StepDrafts, token_ids: Sequence[int]) -> list[tuple[RowDrafts, list[int]]]:
            return [(each, chance.run(each, token_ids)) for each in step.drafts]

        with patch.object(StepDrafts, "runs", runs):
            yield

    def run(self, drafts: RowDrafts, token_ids: Sequence[int]) -> list[int]:
        """Returns the tokens that a row gains: what was drawn, behind as many drafts as chance accepts."""
        accepted = next(
            (n for n in range(len(drafts.token_ids)) if self._dice.random() >= self.alpha), len(drafts.token_ids)
        )
        return [token_ids[drafts.row], *token_ids[drafts.first : drafts.first + accepted]]
