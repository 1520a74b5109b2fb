"""What speculative decoding would bring, by the cost model: the part of `tandem plan --speculate`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from costs.step_cost import StepCost
from wire.errors import InvalidArgument

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
    def parse(cls, text: str) -> Drafting:
        """Parses "acceptance,drafts,cost"; InvalidArgument for anything else."""
        try:
            acceptance, drafts, cost = text.split(",")
            found = cls(float(acceptance), int(drafts), float(cost))
        except ValueError:
            message = f"{text!r} is not ACCEPTANCE,DRAFTS,COST such as 0.7,3,0.02"
            raise InvalidArgument(OPTION, message) from None
        if not (0 <= found.acceptance <= 1 and found.drafts >= 1 and 0 <= found.cost < float("inf")):
            raise InvalidArgument(OPTION, "takes an acceptance of 0 to 1, at least 1 draft, and a cost of at least 0")
        return found

    @property
    def tokens(self) -> float:
        """The expected tokens of a request in a step: 1 + α + … + α^k = (1 - α^(k+1)) / (1 - α)."""
        return sum(self.acceptance**position for position in range(self.drafts + 1))

    def speedup(self, cost: StepCost, batch: int, context: int) -> float:
        """Return tokens per second with drafts ÷ those without, in steps of `batch` requests of so much context."""
        rows = 1 + self.drafts
        plain_s = cost.decode_step_seconds(batch, batch * context)
        verify_s = cost.decode_step_seconds(batch * rows, batch * rows * context)
        return self.tokens * plain_s / (verify_s + self.cost * self.drafts * cost.decode_step_seconds(1, context))

    def break_even(self, cost: StepCost, context: int, most: int) -> int | None:
        """Return the smallest batch for which drafts lose, at most `most`; None if they never do."""
        return next((batch for batch in range(1, most + 1) if self.speedup(cost, batch, context) < 1), None)


def speculation_lines(drafting: Drafting, cost: StepCost, context: int) -> Iterator[str]:
    """Yields the lines of the answer; `context` is the mean context of a request in tokens."""
    yield (
        f"speculative decoding with {drafting.drafts} drafts, each accepted with probability {drafting.acceptance:g}:"
        f" {drafting.tokens:.2f} tokens a step; by the cost model,"
    )
    speedups = ", ".join(f"{drafting.speedup(cost, batch, context):.2f} at {batch}" for batch in BATCHES)
    yield f"  times as fast, by decoding requests: {speedups}"
    found = drafting.break_even(cost, context, BATCHES[-1])
    yield (
        f"  it always pays up to {BATCHES[-1]} requests"
        if found is None
        else f"  it loses from {found} requests on; workers draft only where it pays"
    )
