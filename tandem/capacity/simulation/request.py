"""One request of a simulated load, and its outcome."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.observability.verdict import Verdict
from router.placement.policy import Placement
from tandem.capacity.simulation.prompt import VirtualPrompt
from tandem.capacity.simulation.step_log import StepLog
from tandem.settings.slo import SloClass


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request: when it is sent, its prompt, class and tenant; its answer has exactly `new_tokens` tokens."""

    due_s: float
    prompt: VirtualPrompt
    new_tokens: int
    slo: SloClass
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of an answer: one at the end of each of `count` steps."""

    log: StepLog
    first: int
    count: int


@dataclass(slots=True)
class Outcome:
    """A request's outcome. Times are of the client's clock, in seconds."""

    asked: LoadRequest
    error: str = ""
    """Code of the typed error, empty for a complete answer."""
    ended_s: float = 0.0
    cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    prediction: Placement | None = None
    """The prediction of the first placement."""
    placed_s: float = 0.0
    attempts: int = 1
    firsts_s: list[float] = field(default_factory=list)
    """Time of the first token of each attempt."""
    pieces: list[Piece] = field(default_factory=list)
    """Tokens that each attempt decoded after its first."""
    held_s: float = 0.0
    """Maximum time for which the first token is held until the second."""
    rejected: Verdict | None = None
    """The verdict on a request that was rejected on arrival."""

    def token_s(self, later_s: float) -> Sequence[float]:
        """Returns the time of each token; `later_s` is the delay from a worker to the client."""
        moments: list[float] = []
        for number, first_s in enumerate(self.firsts_s):
            moments.append(first_s + later_s)
            if number < len(self.pieces):
                piece = self.pieces[number]
                moments += [end_s + later_s for end_s in piece.log.ends(piece.first, piece.count)]
        if self.held_s and len(moments) > 1:
            moments[0] = min(moments[0] + self.held_s, moments[1])
        return moments
