"""The interface of all proposers."""

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from costs.step_cost import StepCost
from engine.steps.draws import Draw
from wire.messages import SamplingParams

HEADS_CLASS = 12
"""The class of the drafts of Medusa heads."""
MODEL_CLASS = 13
"""The class of the drafts of a draft model."""
LAST_CLASS = MODEL_CLASS
"""The largest class of a draft."""


class Draft(NamedTuple):
    """A guess for the tokens that follow the newest one of a request."""

    token_ids: Sequence[int]
    """At most as many as were asked for; may be empty."""
    match: int
    """The class of the guess, by which acceptance is learned: the length of the match that it rests on, 0 = none.

    Guesses of another origin have numbers above the longest match.
    """


NO_DRAFT = Draft((), 0)


class Proposer(Protocol):
    """Proposes drafts for running requests, each of which has a key. Owned by one thread.

    The state of a request is the proposer's, from `begin` to `leave`.
    """

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str) -> None:
        """Take a new request with the tokens of its prompt and of its answer so far.

        Requests of different `cache_salt` never learn from each other. ValueError if the key is known.
        """

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """Append tokens that joined the request's answer."""

    def propose(self, key: Hashable, most: int) -> Draft:
        """Return a guess of at most `most` tokens that follow the request's newest one."""

    def leave(self, key: Hashable) -> None:
        """Drop the state of a request."""


@dataclass(frozen=True, slots=True)
class WantedDraft:
    """The draft that a step is to have for one request."""

    key: Hashable
    drafts: int
    """The number of tokens, at least 1."""
    row: int | None
    """The row of the engine's newest step that drew the request's newest token.

    None = an earlier step or another worker drew it, as behind a prompt, a hand-over or a preemption.
    """


@runtime_checkable
class BatchProposer(Proposer, Protocol):
    """A proposer that computes drafts with a model, those of all requests of a step at once.

    How many drafts there are is decided before, by their learned acceptance and by what computing them takes. The
    tokens that `propose` returns are therefore placeholders: their number and their class count.
    """

    def compute(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        """Return the tokens of each draft, at most as many as wanted; may be empty. No step is in flight."""


class ModelProposer(Proposer):
    """Proposes drafts by steps of a complete model, for many requests at once. Owned by one thread.

    A request has drafts once the KV of its context is stored.
    """

    @property
    @abstractmethod
    def cost(self) -> StepCost:
        """The cost model of the steps that propose, with the newest fit."""

    @property
    @abstractmethod
    def memory(self) -> Mapping[str, int]:
        """The bytes of the model's `weights` and `kv` pages."""

    @property
    @abstractmethod
    def max_step_tokens(self) -> int:
        """The most tokens of a step."""

    @abstractmethod
    def missing(self, key: Hashable) -> int:
        """Return the number of tokens of the request whose KV is not stored, the newest one included."""

    @abstractmethod
    def room(self, key: Hashable, drafts: int) -> int:
        """Return how many drafts, at most `drafts`, the request has memory for, which is taken. 0 if there is none."""

    @abstractmethod
    def store_context(self, pieces: Mapping[Hashable, int]) -> None:
        """Store the KV of so many of each request's missing tokens, in one step.

        Each request has `room`, and more tokens are missing than its piece has.
        """

    @abstractmethod
    def propose_all(self, draws: Mapping[Hashable, Sequence[Draw]]) -> Mapping[Hashable, Draft]:
        """Return a draft for each request, of one token for each of its draws: at least one, at most its `room`.

        The KV of all missing tokens is stored as well; they should be few.
        """

    def propose(self, key: Hashable, most: int) -> Draft:
        """See `Proposer`; drawn greedily."""
        return self.propose_all({key: [Draw(SamplingParams(max_tokens=1), 0)] * most})[key]
