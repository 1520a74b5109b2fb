"""What is in the next step, and who hears of its results: the policies and both halves, without a clock or a device.

Whoever owns an engine, real or simulated, asks for a plan, runs it and gives back what it drew, in that order and
perhaps several plans ahead.
"""

from collections.abc import Callable
from dataclasses import dataclass

from costs.step_cost import NOTHING, StepCost, StepWork
from decode_worker.batch_snapshot import StepOutput
from decode_worker.half import DecodeHalf
from engine.steps.batch import StepBatch, StepResult
from prefill_worker.half import PrefillHalf
from wire.messages import Assignment
from worker.batch_growth import BatchGrowth
from worker.step_meter import decode_work, with_prompts
from worker.step_policy import StepPolicy


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step's rows, at least one; the first `work.decode_rows` are the decode half's."""

    batch: StepBatch
    work: StepWork


class StepScheduler:
    """Fills steps from both halves. How much of a step may be prompts is the policy's to say (`step_policy.py`), how
    many requests may decode the growth's (`batch_growth.py`). One thread's.
    """

    def __init__(
        self,
        *,
        decode: DecodeHalf,
        prefill: PrefillHalf,
        max_step_tokens: int,
        cost: Callable[[], StepCost],
        assignment: Assignment,
    ) -> None:
        """`cost` gives the newest fit of what steps take."""
        self._decode = decode
        self._prefill = prefill
        self._max_step_tokens = max_step_tokens
        self._cost = cost
        self.decoding = NOTHING
        """The decode rows of the newest step."""
        self.steer(assignment)

    def steer(self, assignment: Assignment) -> None:
        """Plan as this assignment says from the next plan on. From any thread."""
        self._policy = StepPolicy(assignment, self._cost, self._max_step_tokens)
        self._growth = BatchGrowth(self._cost, assignment.itl_target_s)

    def plan(self) -> StepPlan | None:
        """The next step over both halves' rows, None if there are none, or prompts alone that the step which runs makes
        wait: then there is one when that was applied.
        """
        if not self.decoding.decode_rows and not self._prefill.queue.length and self._decode.idle:
            return None
        targets = self._decode.gap_targets
        decode_rows = self._decode.schedule(self._growth.rows(self.decoding, self._max_step_tokens, targets))
        self.decoding = decode_work(decode_rows)
        if not self._prefill.queue.length:
            self._policy.steps_without_prompts += 1
            return StepPlan(StepBatch((), decode_rows), self.decoding) if decode_rows else None
        waiting = self._prefill.waiting()
        prompts = self._policy.prefill_tokens(self.decoding, waiting, targets)
        if not waiting.prompts:
            return StepPlan(StepBatch((), decode_rows), self.decoding) if decode_rows else None
        prefill_rows = self._prefill.schedule(min(prompts, self._max_step_tokens - len(decode_rows)))
        if not decode_rows and not prefill_rows:
            return None
        return StepPlan(StepBatch(prefill_rows, decode_rows), with_prompts(self.decoding, prefill_rows))

    def apply(self, work: StepWork, result: StepResult) -> StepOutput:
        """Give both halves the results of the oldest plan that was not applied; returns what the routers must hear. The
        caller delivers `PrefillHalf.take_updates` once that is on its way.
        """
        decoded, prefilled = result.split(work.decode_rows)
        output = self._decode.apply(decoded.token_ids, decoded.logprobs)
        if not prefilled.token_ids:
            return output
        return StepOutput(
            [*output.events, *self._prefill.apply(prefilled.token_ids, prefilled.logprobs)], output.completed
        )
