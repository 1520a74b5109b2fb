"""Plans the next step with the rows of both phases and passes its results to them, without a clock or a device.

The owner of an engine, real or simulated, requests a plan, runs it and passes the output to `apply`. It may request the
next plan before it calls `apply`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode_worker.batch_snapshot import DecodedStep
from decode_worker.draft_choice import StepBounds
from decode_worker.scheduler import NO_ROWS, DecodeScheduler
from prefill_worker.scheduler import PrefillScheduler
from tandem.cost_model.chunks import strictest_feasible_target
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import NOTHING, StepWork, chunk_pairs
from tandem.engine.steps.batch import ModelRunnerOutput, StepBatch, StepRow, TokenRows
from tandem.protocol.messages import Assignment, RoutedEvent
from tandem.worker.step_policy import StepPolicy


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A planned step with at least one row; its first `work.decode_rows` rows belong to the decode phase."""

    batch: StepBatch
    work: StepWork
    drafting_s: float = 0.0
    """Seconds that the proposal of draft tokens took during planning."""


class StepScheduler:
    """Fills steps with the rows of both phases.

    `StepPolicy` limits the prompt tokens of a step, `BatchGrowth` the decode rows. Used by one thread. Owned by the
    step loop.
    """

    def __init__(
        self,
        *,
        decode: DecodeScheduler,
        prefill: PrefillScheduler,
        max_step_tokens: int,
        cost: Callable[[], StepCost],
        assignment: Assignment,
    ) -> None:
        """Create the scheduler; `cost` returns the newest fit of the cost model."""
        self._decode = decode
        self._prefill = prefill
        self._max_step_tokens = max_step_tokens
        self._cost = cost
        self.decoding = NOTHING
        """The decode rows of the newest step."""
        self.set_assignment(assignment)

    def set_assignment(self, assignment: Assignment) -> None:
        """Apply this assignment from the next plan on. Any thread may call it."""
        self._policy = StepPolicy(assignment, self._cost, self._max_step_tokens)
        self._growth = BatchGrowth(self._cost, assignment.itl_target_s)

    def plan(self) -> StepPlan | None:
        """Return the next step with the rows of both phases.

        Returns None if there are no rows, or if all of them depend on the step in flight.
        """
        targets, decode_rows, drafting_s = self._decode.gap_targets, NO_ROWS, 0.0
        # Looked at once: a prompt that arrives meanwhile must not join a step that verifies draft tokens.
        prompts_wait = self._prefill.queue.length > 0
        if not self._decode.idle:
            budget = self._growth.rows(self.decoding, self._max_step_tokens, targets)
            scheduled = self._decode.schedule(budget, self._bounds(targets, prompts_wait=prompts_wait))
            if scheduled is None:
                return None
            decode_rows = scheduled
            drafting_s = self._decode.speculation.drafting_s if self._decode.speculation else 0.0
        elif not self.decoding.decode_rows and not prompts_wait:
            return None
        self.decoding = step_work(decode_rows.newest)
        prefill_rows: Sequence[StepRow] = ()
        if prompts_wait:
            waiting = self._prefill.waiting()
            prompts = self._policy.prefill_tokens(self.decoding, waiting, targets)
            if waiting.prompts:
                prefill_rows = self._prefill.schedule(min(prompts, self._max_step_tokens - len(decode_rows)))
        else:
            self._policy.steps_without_prompts += 1
        if not decode_rows and not prefill_rows:
            return None
        return StepPlan(StepBatch(prefill_rows, decode_rows), step_work(decode_rows, prefill_rows), drafting_s)

    def _bounds(self, targets: Sequence[float], *, prompts_wait: bool) -> StepBounds | None:
        """Return the limits for adding draft tokens to the next step: its maximum duration and number of rows.

        `targets` has the maximum seconds between tokens that each decoding request allows, ascending. Returns None if
        the worker does not speculate, or while prompts wait, which then get the rest of the step.
        """
        if self._decode.speculation is None or prompts_wait:
            return None
        cost = self._cost()
        seconds = strictest_feasible_target(targets, cost.seconds(self.decoding), self._growth.target_s)
        return StepBounds(cost, seconds, self._max_step_tokens)

    def apply(self, work: StepWork, output: ModelRunnerOutput) -> tuple[Sequence[RoutedEvent], DecodedStep | None]:
        """Pass the output of a step to both schedulers; steps are passed in the order of their plans.

        Returns the events for the routers, and the decoded step with the tokens of those requests that have no event;
        None instead of the decoded step if no request decoded. The caller then delivers the updates of
        `PrefillScheduler.take_updates`.
        """
        decoded, prefilled = output.split(work.decode_rows)
        step = self._decode.apply(decoded.token_ids, decoded.logprobs) if work.decode_rows else None
        events = [] if step is None else step.events
        if work.prefill_tokens:
            events = [*events, *self._prefill.apply(prefilled.token_ids, prefilled.logprobs)]
        return events, step


class BatchGrowth:
    """Limits the size of the decode batch so that the inter-token targets of all its requests are met.

    Requests beyond the limit wait with their KV until others end; the oldest continues first. Routers place requests by
    the same cost model, so they rarely send requests that exceed the limit.
    """

    def __init__(self, cost: Callable[[], StepCost], itl_target_s: float | None) -> None:
        """Create the limit; `cost` returns the newest fit of the cost model.

        There is no limit if neither `itl_target_s` nor a request sets a target.
        """
        self._cost = cost
        self.target_s = itl_target_s
        self._context = 0.0
        """Mean context tokens of a row in the newest step that had rows."""

    def rows(self, running: StepWork, most: int, targets: Sequence[float] = ()) -> int:
        """Return the maximum number of decode rows of the next step: at least the running rows, at most `most`.

        `targets` are the inter-token targets of the running requests in seconds, ascending; infinite = no target.
        Targets that the running rows miss already are ignored. A request that joins is assumed to have the mean context
        of the rows that run or ran last. If even a batch of one request would miss the strictest target, the batch is
        not limited, because keeping requests waiting would not help to meet it.
        """
        if running.decode_rows:
            self._context = running.decode_context_tokens / running.decode_rows
        if self.target_s is None and (not targets or targets[0] == math.inf):
            return most
        cost = self._cost()
        decoding_s = cost.decode_step_seconds(running.decode_rows, running.decode_context_tokens)
        rows = cost.rows_within(strictest_feasible_target(targets, decoding_s, self.target_s), self._context)
        return min(most, max(running.decode_rows, int(min(most, rows)))) if rows >= 1.0 else most


def step_work(rows: TokenRows, prompts: Sequence[StepRow] = ()) -> StepWork:
    """Return the work of decode rows and of chunks of prompts."""
    return StepWork(
        sum(len(row.token_ids) for row in prompts),
        sum(chunk_pairs(len(row.token_ids), row.start) for row in prompts),
        len(rows),
        rows.context_tokens,
        len(rows) - len(rows.newest),
    )
