"""The speedup that the cost model predicts for speculative decoding, and the options that describe the draft tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from decode_worker.draft_choice import ROWS_MAX
from decode_worker.model_speculation import DraftCosts
from tandem.capacity.simulation.drafts import Drafts
from tandem.cost_model.acceptance import Acceptance
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork
from tandem.engine.speculation.proposer import DraftSource, ProposerName
from tandem.engine.steps.draft_groups import DRAFTS_MAX
from tandem.protocol.errors import InvalidArgument

if TYPE_CHECKING:
    pass

OPTION = "--speculate"


@dataclass(frozen=True, slots=True)
class Drafting:
    """The draft tokens that each request has in each step: their number, acceptance probability and cost."""

    acceptance: float
    """Probability, 0 to 1, that a draft token is accepted, given that all earlier tokens of the draft were."""
    drafts: int
    cost: float
    """Time to propose one draft token ÷ time of a decode step of one request."""

    @classmethod
    def parse(cls, text: str, cost: float = 0.0) -> Drafting:
        """Parse "acceptance,drafts,cost"; without the third number, the cost is `cost`.

        Raises InvalidArgument for other text and for numbers out of range.
        """
        try:
            acceptance, drafts, given = (text if text.count(",") > 1 else f"{text},{cost}").split(",")
            drafting = cls(float(acceptance), int(drafts), float(given))
        except ValueError:
            message = f"{text!r} is not ACCEPTANCE,DRAFTS or ACCEPTANCE,DRAFTS,COST such as 0.7,3,0.02"
            raise InvalidArgument(OPTION, message) from None
        if not (
            0 <= drafting.acceptance <= 1 and 1 <= drafting.drafts <= DRAFTS_MAX and 0 <= drafting.cost < float("inf")
        ):
            message = f"takes an acceptance of 0 to 1, 1 to {DRAFTS_MAX} drafts, and a cost of at least 0"
            raise InvalidArgument(OPTION, message)
        return drafting

    @property
    def tokens(self) -> float:
        """Expected tokens of a request per step: 1 + α + … + α^k = (1 - α^(k+1)) / (1 - α), for k = `drafts`."""
        return 1 + sum(self._survival(self.drafts))

    def _survival(self, drafts: int) -> list[float]:
        return Acceptance(prior=self.acceptance).survival(DraftSource(ProposerName.DRAFT_MODEL), drafts)

    def simulated(self, cost: StepCost, context: int) -> Drafts:
        """Return the drafts of simulated workers whose steps cost `cost`; a request's context has `context` tokens."""
        return Drafts(self.acceptance, self.drafts, self.cost * cost.decode_step_seconds(1, context))

    def speedup(self, cost: StepCost, batch: int, context: int) -> float:
        """Return tokens per second with draft tokens ÷ those without, for `batch` requests of `context` tokens each.

        Workers predict the speedup with the same `DraftCosts`. Attention reads the KV of a request once for all its
        rows. Requests have fewer draft tokens if the step would otherwise have more than ROWS_MAX rows; if none of them
        has a draft token, the speedup is 1.
        """
        drafts = min(self.drafts, ROWS_MAX // batch - 1)
        if drafts < 1:
            return 1.0
        plain = StepWork(decode_rows=batch, decode_context_tokens=batch * context)
        costs = DraftCosts(cost, self.simulated(cost, context).cost, plain, batch, batch * context)
        seconds = cost.seconds(plain)
        return seconds / (seconds - costs.count(self._survival(drafts), kv_read_once=True).saved_s)

    def break_even(self, cost: StepCost, context: int) -> int:
        """Return the smallest batch size from which draft tokens never raise the throughput; at most ROWS_MAX.

        Steps of ROWS_MAX requests have no draft tokens. Draft tokens may fail to raise the throughput of smaller
        batches, too, because a step that verifies them has an additional fixed cost.
        """
        paying = (batch for batch in range(1, ROWS_MAX) if self.speedup(cost, batch, context) > 1)
        return 1 + max(paying, default=0)
