"""The interface of all proposers."""

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from tandem.cost_model.step_cost import StepCost
from tandem.engine.steps.draws import Draw
from tandem.protocol.messages import SamplingParams

DRAFTS_MAX = 7
"""The most drafts of one request in a step."""
HEADS_CLASS = 12
"""The class of the drafts of Medusa heads."""
MODEL_CLASS = 13
"""The class of the drafts of a draft model."""
EAGLE_CLASS = 14
"""The class of the drafts of an EAGLE head."""
LAST_CLASS = EAGLE_CLASS
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
    draws: Sequence[Draw]
    """The target's draws of the tokens to guess, at least one."""
    rows: Sequence[int] = ()
    """The rows of the engine's newest step that drew the request's newest tokens, the newest last.

    Empty = an earlier step or another worker drew them, as behind a prompt, a hand-over or a preemption.
    """


class BatchProposer(Proposer):
    """A proposer that computes drafts with trained weights, those of all requests of a step at once.

    What computing takes is part of the step that drafts have to pay for, so their number is decided before. A proposer
    with KV of its own has drafts for a request once the KV of its context is stored; `missing`, `room` and
    `store_context` are for those.
    """

    draft_class: int
    """The class of its drafts, by which acceptance is learned."""
    longest: int = DRAFTS_MAX
    """The most tokens of a draft."""
    max_step_tokens: int
    """The most tokens of a step that stores KV, and of the first one that proposes."""
    memory: Mapping[str, int] = MappingProxyType({})
    """The bytes of the `weights` and, of a proposer with KV of its own, of the `kv` pages."""

    @property
    @abstractmethod
    def cost(self) -> StepCost:
        """The cost model of the steps that propose, one for each token of the longest draft, with the newest fit."""

    def missing(self, key: Hashable) -> int:
        """Return the number of tokens of the request whose KV is not stored, the newest one included."""
        del key
        return 1

    def missing_at_first(self, tokens: int) -> int:
        """Return what `missing` will be once a request of so many tokens begins."""
        return tokens

    def room(self, key: Hashable, drafts: int) -> int:
        """Return how many drafts, at most `drafts`, the request has memory for, which is taken. 0 if there is none."""
        del key
        return drafts

    def store_context(self, pieces: Mapping[Hashable, int]) -> None:
        """Store the KV of so many of each request's missing tokens, in one step.

        Each request has `room`, and more tokens are missing than its piece has.
        """

    @abstractmethod
    def compute(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        """Return the tokens of each draft, at most one for each draw and as many as `room`; may be empty.

        No step of the engine is in flight. The KV of all missing tokens, which should be few, is stored as well.
        """

    def propose(self, key: Hashable, most: int) -> Draft:
        """See `Proposer`; drawn greedily, behind tokens that no step of the engine drew."""
        draws = [Draw(SamplingParams(max_tokens=1), 0)] * most
        return Draft(self.compute([WantedDraft(key, draws)])[0], self.draft_class)
