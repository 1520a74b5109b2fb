"""The interface of all proposers."""

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, Protocol

from tandem.cost_model.step_cost import StepCost
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.messages import SamplingParams

DRAFTS_MAX = 7
"""The most drafts of one request in a step."""
NGRAM_MAX = 3
"""The longest n-gram that is looked up, before those of 2 and 1 tokens."""
MATCH_MAX = 8
"""The length at which the comparison of a match with the last tokens stops."""


class ProposerName(StrEnum):
    """The proposers, by which metrics count drafts."""

    NGRAM = "ngram"
    """The tokens after an earlier occurrence of the last ones in the same request."""
    SUFFIX = "suffix"
    """The tokens after an occurrence of the last ones in an earlier answer of the same tenant."""
    MEDUSA = "medusa"
    DRAFT_MODEL = "draft_model"
    EAGLE = "eagle"


class DraftSource(NamedTuple):
    """The source of a draft; drafts of equal sources are assumed to be accepted alike."""

    proposer: ProposerName
    match: int = 0
    """The number of last tokens that were found, at most `MATCH_MAX`; 0 = the proposer looks up none."""


DRAFT_SOURCES = (
    *(DraftSource(ProposerName.NGRAM, match) for match in range(1, MATCH_MAX + 1)),
    *(DraftSource(ProposerName.SUFFIX, match) for match in range(1, NGRAM_MAX + 1)),
    *(DraftSource(name) for name in (ProposerName.MEDUSA, ProposerName.DRAFT_MODEL, ProposerName.EAGLE)),
)
"""All sources."""


class Draft(NamedTuple):
    """A guess for the tokens that follow the newest one of a request."""

    token_ids: Sequence[int]
    """At most as many as were asked for; may be empty."""
    source: DraftSource


NO_DRAFT = Draft((), DraftSource(ProposerName.NGRAM))


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
    draws: Sequence[SamplingInput]
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

    source: DraftSource
    """The source of its drafts."""
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
        draws = [SamplingInput(SamplingParams(max_tokens=1), 0)] * most
        return Draft(self.compute([WantedDraft(key, draws)])[0], self.source)
