"""The state of a request in the simulated router."""

from dataclasses import dataclass

from router.observability.prediction_quality import PlacementRecord
from router.placement.policy import Placement
from router.placement.queue import QueuedRequest
from tandem.capacity.simulation.request import Outcome, Piece
from tandem.capacity.simulation.step_log import StepLog
from tandem.protocol.messages import RequestEvent, RequestRef, SamplingParams


@dataclass(slots=True, eq=False)
class Flow:
    """A request that has not ended."""

    queued: QueuedRequest
    outcome: Outcome
    sampling: SamplingParams
    pair: Placement | None = None
    attempt: int = 1
    failures: int = 0
    tokens: int = 0
    """Answer tokens received, or known to be decoded before the attempt failed."""

    @property
    def ref(self) -> RequestRef:
        """The request's id with its attempt."""
        return RequestRef(self.queued.wire_id, self.attempt)

    def close_piece(self, log: StepLog, number: int, event: RequestEvent, tokens: StepLog | None) -> None:
        """Records what the attempt has decoded up to this event, one token per step unless `tokens` has their times.

        The event is of step `number` of the worker with that `log`; a preempted request decoded before that step.
        """
        self.tokens = event.first_index + len(event.token_ids)
        decoded = self.tokens - self.queued.answered - 1
        pieces, attempts = self.outcome.pieces, len(self.outcome.firsts_s)
        del pieces[attempts - 1 :]
        first = number + (not event.preempted) - decoded
        pieces.append(Piece(log, first, decoded) if tokens is None else Piece(tokens, 0, decoded))

    def placement_record(self, later_s: float) -> PlacementRecord | None:
        """Returns its prediction with the observed values; None unless the first attempt completed it.

        A token takes `later_s` from its worker to the client.
        """
        outcome = self.outcome
        if outcome.prediction is None or outcome.error or self.attempt > 1:
            return None
        gaps = self.tokens - 1
        return PlacementRecord(
            request_id=self.queued.wire_id,
            prefill_worker=outcome.prefill_worker,
            decode_worker=outcome.decode_worker,
            slo_class=self.queued.slo.name,
            prediction=outcome.prediction,
            ttft_s=outcome.firsts_s[0] + later_s - outcome.placed_s,
            itl_s=(outcome.ended_s - later_s - outcome.firsts_s[0]) / gaps if gaps > 0 else None,
            cached_tokens=outcome.cached_tokens,
        )
