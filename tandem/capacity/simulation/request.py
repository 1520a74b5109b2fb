"""One request of a simulated load, its outcome, and the times of its tokens."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from router.observability import request_outcome
from router.observability.request_outcome import GapTracker, PhaseTimes, RequestOutcome
from router.placement.policy import Placement
from tandem.capacity.simulation.prompt import VirtualPrompt
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.lifecycle.placement import PlacementStats
from tandem.protocol.lifecycle.spans import Phase
from tandem.settings.slo import SloClass


class StepLog:
    """The end times of a worker's steps in seconds, ascending; steps are numbered from 0."""

    def __init__(self) -> None:
        self._ends = array("d")

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, end_s: float) -> int:
        """Append the end time of a step; return the step's number."""
        self._ends.append(end_s)
        return len(self._ends) - 1

    def extend(self, ends_s: NDArray[np.float64]) -> None:
        """Append the end times of several steps."""
        self._ends.frombytes(ends_s.tobytes())

    def ends(self, first: int, count: int) -> Sequence[float]:
        """Return the end times of `count` steps, starting with step `first`."""
        return self._ends[first : first + count]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request of a load: sending time, prompt, exact number of answer tokens, service class and tenant."""

    due_s: float
    prompt: VirtualPrompt
    new_tokens: int
    slo: SloClass
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of an answer, one at the end of each of `count` steps of `log`, starting with step `first`."""

    log: StepLog
    first: int
    count: int


@dataclass(slots=True)
class Outcome:
    """The outcome of a simulated request. Times are in seconds on the virtual clock."""

    asked: LoadRequest
    error: str = ""
    """The error code; empty for a complete answer."""
    ended_s: float = 0.0
    cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    prediction: Placement | None = None
    """The first placement of the request, with its predicted latencies; None if the request was never placed."""
    placement: PlacementStats | None = None
    """The sources of the prompt's KV on its prefill worker, with the predicted and the actual cost; None on a retry."""
    placed_s: float = 0.0
    attempts: int = 1
    firsts_s: list[float] = field(default_factory=list)
    """Time of the first token of each attempt."""
    pieces: list[Piece] = field(default_factory=list)
    """For each attempt, the tokens that it decoded after its first token."""
    held_s: float = 0.0
    """Maximum time in seconds for which the router holds the first token back to send it with the second."""
    refused: ResourceExhausted | None = None
    """The error with which the request was rejected on arrival; None if it was not."""

    def token_s(self, later_s: float) -> Sequence[float]:
        """Return the time in seconds at which the client receives each token.

        `later_s` is the delay from worker to client.
        """
        moments: list[float] = []
        for number, first_s in enumerate(self.firsts_s):
            moments.append(first_s + later_s)
            if number < len(self.pieces):
                piece = self.pieces[number]
                moments += [end_s + later_s for end_s in piece.log.ends(piece.first, piece.count)]
        if self.held_s and len(moments) > 1:
            moments[0] = min(moments[0] + self.held_s, moments[1])
        return moments

    def judge(
        self, slo: SloClass, idle_step_s: float, moments: Sequence[float] | NDArray[np.float64]
    ) -> RequestOutcome:
        """Return the outcome of the request by the router's rules: it met the targets of `slo`, missed one, or failed.

        `moments` are the times at which the client received the tokens. ITL targets that are given in steps are
        multiples of `idle_step_s`.
        """
        if self.error:
            if self.refused is not None:
                return request_outcome.rejected(self.refused)
            return RequestOutcome(request_outcome.Outcome.FAILED, Phase.QUEUE)
        pace = GapTracker.of(slo.itl_target(idle_step_s), moments)
        ttft_s, queued_s = float(moments[0]) - self.asked.due_s, self.placed_s - self.asked.due_s
        times = PhaseTimes(queued_s, ttft_s - queued_s, None, None)
        return request_outcome.judge(slo, pace, ttft_s, times)
