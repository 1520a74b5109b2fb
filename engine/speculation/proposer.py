"""The interface of all proposers."""

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from costs.step_cost import StepCost

MODEL_CLASS = 12
"""The class of the guesses of a draft model."""
LAST_CLASS = MODEL_CLASS
"""The largest class of a draft."""


@dataclass(frozen=True, slots=True)
class Draft:
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


class BatchProposer(Proposer):
    """Proposes drafts by steps of a model of its own, for many requests at once. Owned by one thread.

    A request has drafts once the KV of its context is stored.
    """

    @property
    @abstractmethod
    def cost(self) -> StepCost:
        """The cost model of the steps that propose, with the newest fit."""

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
    def propose_all(self, drafts: Mapping[Hashable, int]) -> Mapping[Hashable, Draft]:
        """Return so many drafts for each request, at least one and at most its `room`.

        The KV of all missing tokens is stored as well; they should be few.
        """

    def propose(self, key: Hashable, most: int) -> Draft:
        """See `Proposer`."""
        return self.propose_all({key: most})[key]
