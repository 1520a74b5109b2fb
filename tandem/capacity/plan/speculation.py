"""The speedup that speculative decoding would have, by the cost model, and the options that describe the drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from decode_worker.draft_choice import ROWS_MAX
from decode_worker.model_speculation import DraftCosts
from tandem.capacity.simulation.drafts import Drafts
from tandem.cost_model.acceptance import Acceptance
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork
from tandem.engine.speculation.proposer import DRAFTS_MAX, DraftSource, ProposerName
from tandem.protocol.errors import InvalidArgument

if TYPE_CHECKING:
    pass

OPTION = "--speculate"


@dataclass(frozen=True, slots=True)
class Drafting:
    """The drafts that each request has in every step."""

    acceptance: float
    """The probability that a draft token is accepted if those before it were, 0 to 1."""
    drafts: int
    cost: float
    """The time to propose one draft token ÷ that of a decode step of one request."""

    @classmethod
    def parse(cls, text: str, cost: float = 0.0) -> Drafting:
        """Parse "acceptance,drafts,cost", where `cost` is the default of the third.

        Raises InvalidArgument for other text.
        """
        try:
            acceptance, drafts, given = (text if text.count(",") > 1 else f"{text},{cost}").split(",")
            found = cls(float(acceptance), int(drafts), float(given))
        except ValueError:
            message = f"{text!r} is not ACCEPTANCE,DRAFTS or ACCEPTANCE,DRAFTS,COST such as 0.7,3,0.02"
            raise InvalidArgument(OPTION, message) from None
        if not (0 <= found.acceptance <= 1 and 1 <= found.drafts <= DRAFTS_MAX and 0 <= found.cost < float("inf")):
            message = f"takes an acceptance of 0 to 1, 1 to {DRAFTS_MAX} drafts, and a cost of at least 0"
            raise InvalidArgument(OPTION, message)
        return found

    @property
    def tokens(self) -> float:
        """The expected tokens of a request in a step: 1 + α + … + α^k = (1 - α^(k+1)) / (1 - α), for k = `drafts`."""
        return 1 + sum(self._survival(self.drafts))

    def _survival(self, drafts: int) -> list[float]:
        return Acceptance(prior=self.acceptance).survival(DraftSource(ProposerName.DRAFT_MODEL), drafts)

    def simulated(self, cost: StepCost, context: int) -> Drafts:
        """Return these drafts for simulated workers whose steps cost `cost`."""
        return Drafts(self.acceptance, self.drafts, self.cost * cost.decode_step_seconds(1, context))

    def speedup(self, cost: StepCost, batch: int, context: int) -> float:
        """Return tokens per second with drafts ÷ those without, in steps of `batch` requests of `context` tokens each.

        Workers predict the speedup with the same `DraftCosts`. Attention reads the KV of a request once for all its
        rows. Requests have fewer drafts where a step would have more than ROWS_MAX rows; if none are left, the speedup
        is 1.
        """
        drafts = min(self.drafts, ROWS_MAX // batch - 1)
        if drafts < 1:
            return 1.0
        plain = StepWork(decode_rows=batch, decode_context_tokens=batch * context)
        costs = DraftCosts(cost, self.simulated(cost, context).cost, plain, batch, batch * context)
        seconds = cost.seconds(plain)
        return seconds / (seconds - costs.count(self._survival(drafts), kv_read_once=True).saved_s)

    def break_even(self, cost: StepCost, context: int) -> int:
        """Return the batch from which on drafts never pay; at most ROWS_MAX, where steps have none.

        They may not pay for smaller batches either: a step that verifies drafts has a cost of its own.
        """
        paying = (batch for batch in range(1, ROWS_MAX) if self.speedup(cost, batch, context) > 1)
        return 1 + max(paying, default=0)
