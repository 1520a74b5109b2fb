"""What speculative decoding would bring, by the cost model: the part of `tandem plan --speculate`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from decode_worker.draft_choice import ROWS_MAX
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork
from tandem.engine.speculation.proposer import DRAFTS_MAX
from tandem.protocol.errors import InvalidArgument

if TYPE_CHECKING:
    from tandem.capacity.planner.demand import Demand
    from tandem.capacity.simulation.drafts import Drafts
    from tandem.engine.config.model import ModelSpec

BATCHES = (1, 8, 32, 64, 128, 256)
OPTION = "--speculate"


@dataclass(frozen=True, slots=True)
class Drafting:
    """Drafts of each request in every step."""

    acceptance: float
    """The probability that a draft is accepted if those before it were, 0 to 1."""
    drafts: int
    cost: float
    """The time to propose one draft ÷ that of a decode step of one request."""

    @classmethod
    def parse(cls, text: str, cost: float = 0.0) -> Drafting:
        """Parses "acceptance,drafts,cost", where `cost` is the default; InvalidArgument for anything else."""
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
        """The expected tokens of a request in a step: 1 + α + … + α^k = (1 - α^(k+1)) / (1 - α)."""
        return self._tokens(self.drafts)

    def _tokens(self, drafts: int) -> float:
        return sum(self.acceptance**position for position in range(drafts + 1))

    def simulated(self, cost: StepCost, context: int) -> Drafts:
        """Return such drafts of simulated workers, whose steps of one request cost what `cost` says."""
        from tandem.capacity.simulation.drafts import Drafts

        return Drafts(self.acceptance, self.drafts, self.cost * cost.decode_step_seconds(1, context))

    def speedup(self, cost: StepCost, batch: int, context: int) -> float:
        """Return tokens per second with drafts ÷ those without, in steps of `batch` requests of so much context.

        Attention reads the KV of a request once for all its rows. Requests have fewer drafts where the step would have
        more than ROWS_MAX rows; 1 if none.
        """
        drafts = min(self.drafts, ROWS_MAX // batch - 1)
        if drafts < 1:
            return 1.0
        plain = StepWork(decode_rows=batch, decode_context_tokens=batch * context)
        verify_s = cost.seconds(plain.with_drafts(batch * drafts, 0))
        drafting_s = self.cost * drafts * cost.decode_step_seconds(1, context)
        return self._tokens(drafts) * cost.seconds(plain) / (verify_s + drafting_s)

    def break_even(self, cost: StepCost, context: int) -> int:
        """Return the smallest batch for which drafts do not pay; at most ROWS_MAX, where steps have none."""
        return next(batch for batch in range(1, ROWS_MAX + 1) if self.speedup(cost, batch, context) <= 1)


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """The memory of a draft model, or of heads, beside the model; nothing without either."""

    weight_bytes: int = 0
    model: ModelSpec | None = None
    """The draft model, or an EAGLE head as a model of one layer; None for Medusa heads."""

    @classmethod
    def of(cls, folder: Path, model: ModelSpec) -> DraftMemory:
        """Return that of a folder, in bfloat16 on a GPU."""
        import torch

        from tandem.engine.config import EngineConfig
        from tandem.engine.speculation.draft_folder import draft_bytes, drafting_model

        config = EngineConfig(folder, dtype="bfloat16", draft=folder)
        weights = draft_bytes(config, model, torch.bfloat16, torch.device("cuda"))
        return cls(weights, drafting_model(folder, model))

    def kv_bytes_per_token(self, demand: Demand) -> float:
        """Return the KV of a token in the draft model."""
        from tandem.capacity.simulation.hardware import kv_bytes_per_held_token

        return 0.0 if self.model is None else kv_bytes_per_held_token(self.model, demand.kv_tokens)


NO_DRAFT_MEMORY = DraftMemory()
"""Without drafts, or with those of look-ups."""


def speculation_lines(
    drafting: Drafting, cost: StepCost, context: int, fitted: StepCost | None = None
) -> Iterator[str]:
    """Yields the lines of the answer; `context` is the mean context of a request in tokens.

    They are by the cost model of the roofline and, if there is one, by that which was fitted to measured steps.
    """
    yield (
        f"speculative decoding with {drafting.drafts} drafts, each accepted with probability {drafting.acceptance:g}"
        f" and proposed in {drafting.cost:.3g} of a step: {drafting.tokens:.2f} tokens a step"
    )
    for name, costs in (("by the roofline", cost), ("by the measured steps", fitted)):
        if costs is None:
            continue
        speedups = ", ".join(f"{drafting.speedup(costs, batch, context):.2f} at {batch}" for batch in BATCHES)
        found = drafting.break_even(costs, context)
        yield f"  {name}, times as fast by decoding requests: {speedups}; it does not pay from {found} on"
    yield "  workers draft only where it pays"
