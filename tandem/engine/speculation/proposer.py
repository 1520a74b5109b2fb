"""The interface of all proposers of draft tokens."""

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
"""The most draft tokens of one request in a step."""
NGRAM_MAX = 3
"""The length of the longest n-gram that is looked up, before those of 2 and of 1 tokens."""
MATCH_MAX = 8
"""The number of tokens after which comparing a match with the last tokens stops."""


class ProposerName(StrEnum):
    """The proposers; metrics count draft tokens by these names."""

    NGRAM = "ngram"
    """The tokens after an earlier occurrence of the last tokens in the same request."""
    SUFFIX = "suffix"
    """The tokens after an occurrence of the last tokens in an earlier output for the same tenant."""
    MEDUSA = "medusa"
    DRAFT_MODEL = "draft_model"
    EAGLE = "eagle"


class DraftSource(NamedTuple):
    """The source of a draft. Drafts of equal sources are assumed to have the same probability of acceptance."""

    proposer: ProposerName
    match: int = 0
    """The number of last tokens that were found, at most `MATCH_MAX`; 0 = the proposer does not look tokens up."""


DRAFT_SOURCES = (
    *(DraftSource(ProposerName.NGRAM, match) for match in range(1, MATCH_MAX + 1)),
    *(DraftSource(ProposerName.SUFFIX, match) for match in range(1, NGRAM_MAX + 1)),
    *(DraftSource(name) for name in (ProposerName.MEDUSA, ProposerName.DRAFT_MODEL, ProposerName.EAGLE)),
)
"""All sources of drafts."""


class Draft(NamedTuple):
    """A guess of the tokens that follow the newest token of a request."""

    token_ids: Sequence[int]
    """At most as many tokens as the caller wanted; may be empty."""
    source: DraftSource


NO_DRAFT = Draft((), DraftSource(ProposerName.NGRAM))


class Proposer(Protocol):
    """Proposes drafts for running requests, each of which is named by a key. Only one thread uses a proposer.

    The proposer owns the state of a request from `begin` to `leave`.
    """

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str) -> None:
        """Take a new request with the tokens of its prompt and of its output so far.

        A proposer never uses the tokens of a request for requests of another `cache_salt`. Raises ValueError if the key
        is known.
        """

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """Append new tokens of the request's output."""

    def propose(self, key: Hashable, most: int) -> Draft:
        """Return a guess of at most `most` tokens that follow the request's newest token."""

    def leave(self, key: Hashable) -> None:
        """Drop the state of a request."""


@dataclass(frozen=True, slots=True)
class WantedDraft:
    """The draft that a step wants for one request."""

    key: Hashable
    draws: Sequence[SamplingInput]
    """The sampling inputs with which the target will sample the tokens to guess, at least one."""
    rows: Sequence[int] = ()
    """The rows of the engine's newest step that sampled the request's newest tokens, in the order of the tokens.

    Empty if an earlier step or another worker sampled them, as after a prompt, a hand-over or a preemption.
    """


class BatchProposer(Proposer):
    """A proposer that computes drafts with trained weights, for all requests of a step at once.

    Its computation takes time in the step, which accepted draft tokens have to save again, so the number of draft
    tokens is decided before it runs. A proposer with KV of its own can propose for a request only once the KV of the
    request's context is stored; `missing`, `room` and `store_context` serve such proposers.
    """

    source: DraftSource
    """The source that its drafts name."""
    longest: int = DRAFTS_MAX
    """The most tokens in a draft."""
    max_step_tokens: int
    """The most tokens of a step that stores KV, and of the first step of a draft."""
    memory: Mapping[str, int] = MappingProxyType({})
    """The bytes of the `weights` and, for a proposer with its own KV, of the `kv` pages."""

    @property
    @abstractmethod
    def cost(self) -> StepCost:
        """The cost model, with the newest fit, of the proposer's steps: one for each token of the longest draft."""

    def missing(self, key: Hashable) -> int:
        """Return the number of tokens of the request whose KV is not stored, the newest one included."""
        del key
        return 1

    def missing_at_first(self, tokens: int) -> int:
        """Return the result of `missing` right after a request with `tokens` tokens begins."""
        return tokens

    def room(self, key: Hashable, drafts: int) -> int:
        """Return for how many of `drafts` tokens the request has memory, and reserve it; 0 if there is none."""
        del key
        return drafts

    def store_context(self, pieces: Mapping[Hashable, int]) -> None:
        """Store the KV of these numbers of missing tokens of each request, in one step.

        Each request has memory for them (`room`), and is missing more tokens than its number here.
        """

    @abstractmethod
    def compute(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        """Return the tokens of each draft, at most one for each draw and as many as `room` allows.

        A draft may be empty. The caller ensures that no step of the engine is in flight. The call also stores the KV of
        all missing tokens, which should be few.
        """

    def propose(self, key: Hashable, most: int) -> Draft:
        """Return a greedy draft of `most` tokens, as if no step of the engine had sampled the newest tokens."""
        draws = [SamplingInput(SamplingParams(max_tokens=1), 0)] * most
        return Draft(self.compute([WantedDraft(key, draws)])[0], self.source)
