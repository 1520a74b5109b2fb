"""Draft tokens of simulated workers: accepted at random; the real speculation control chooses their number.

Every simulated token is 0, so a draft token 0 is accepted and a draft token 1 is rejected.
"""

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from decode_worker.drafting_batch import DraftingBatch
from decode_worker.model_speculation import ModelSpeculation
from decode_worker.request import DecodeRequest
from decode_worker.speculation import Speculation
from tandem.cost_model.step_cost import CostParameters, StepCost
from tandem.engine.speculation.proposer import (
    BatchProposer,
    Draft,
    DraftSource,
    Proposer,
    ProposerName,
    WantedDraft,
)
from tandem.engine.steps.draft_groups import DRAFTS_MAX

_LOOK_UP = DraftSource(ProposerName.NGRAM, 1)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Configuration of the draft tokens that a simulated worker proposes."""

    acceptance: float
    """Probability, 0 to 1, that a draft token is accepted, given that all earlier tokens of the draft were."""
    most: int = DRAFTS_MAX
    """Maximum number of draft tokens of a request in one step."""
    token_s: float = 0.0
    """Seconds that the draft model takes to propose one token for all requests of a step.

    0 = n-grams, which take no time.
    """

    @property
    def cost(self) -> StepCost:
        """The cost of the draft model's steps, which is independent of their tokens and context."""
        return StepCost(CostParameters(self.token_s, 0.0, 0.0, 0.0, 0.0, 0.0))

    def speculation(self, batch: DraftingBatch, grow: Callable[[DecodeRequest], bool]) -> Speculation:
        """Return the speculation control of a new worker; it decides how many draft tokens each request gets."""
        chance = _Chance(self)
        if not self.token_s:
            return Speculation(_LookUps(chance), batch, grow, _cut_all)
        model = _Model(chance)
        return ModelSpeculation(model, batch, grow, _cut_all, clock=lambda: model.spent_s)


class _Chance:
    def __init__(self, drafts: Drafts) -> None:
        self.drafts = drafts
        self._dice = random.Random(0)

    def tokens(self, most: int) -> list[int]:
        """Return up to `most` draft tokens: 0 with the acceptance probability, else 1."""
        return [int(self._dice.random() >= self.drafts.acceptance) for _ in range(min(most, self.drafts.most))]


class _Stateless(Proposer):
    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str) -> None: ...

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None: ...

    def leave(self, key: Hashable) -> None: ...


class _LookUps(_Stateless):
    def __init__(self, chance: _Chance) -> None:
        self._chance = chance

    def propose(self, key: Hashable, most: int) -> Draft:
        del key
        return Draft(self._chance.tokens(most), _LOOK_UP)


class _Model(_Stateless, BatchProposer):
    """A draft model that computes the KV of a context in no time."""

    source = DraftSource(ProposerName.DRAFT_MODEL)
    max_step_tokens = 1 << 30

    def __init__(self, chance: _Chance) -> None:
        self._chance = chance
        self.longest = chance.drafts.most
        self.spent_s = 0.0
        """Total seconds spent on proposing draft tokens."""

    @property
    def cost(self) -> StepCost:
        return self._chance.drafts.cost

    def compute(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        self.spent_s += self._chance.drafts.token_s * max(len(draft.draws) for draft in wanted)
        return [self._chance.tokens(len(draft.draws)) for draft in wanted]


def _cut_all(*_: object) -> int:
    """Return 0: simulated requests have no grammar, so no draft is cut."""
    return 0
