"""One request of a simulated load, and what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.observability.verdict import Verdict
from router.placement.latency_model import Prediction
from router.slo import SloClass
from simulation.prompt import VirtualPrompt
from simulation.step_log import StepLog


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """When it is sent, what it asks, and as whose; its answer has exactly so many tokens."""

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
    """How a request ended. Moments are those of its client's clock, in seconds."""

    asked: LoadRequest
    error: str = ""
    """Code of the typed error, empty for a whole answer."""
    ended_s: float = 0.0
    cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    prediction: Prediction | None = None
    """Of its first placement."""
    placed_s: float = 0.0
    attempts: int = 1
    firsts_s: list[float] = field(default_factory=list)
    """The first token of each attempt."""
    pieces: list[Piece] = field(default_factory=list)
    """What was decoded behind each of these."""
    held_s: float = 0.0
    """How long its first token may wait for the second."""
    turned_away: Verdict | None = None
    """At the listener, at once."""

    def token_s(self, later_s: float) -> Sequence[float]:
        """The moment of each token; `later_s` is how long one takes from a worker to the client."""
        moments: list[float] = []
        for number, first_s in enumerate(self.firsts_s):
            moments.append(first_s + later_s)
            if number < len(self.pieces):
                piece = self.pieces[number]
                moments += [end_s + later_s for end_s in piece.log.ends(piece.first, piece.count)]
        if self.held_s and len(moments) > 1:
            moments[0] = min(moments[0] + self.held_s, moments[1])
        return moments
