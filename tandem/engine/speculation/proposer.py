"""The interface of proposers of draft tokens."""

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
"""Maximum number of draft tokens of one request in a step."""
NGRAM_MAX = 3
"""The length of the longest n-gram that is looked up; shorter ones are looked up only if the longest has no match."""
MATCH_MAX = 8
"""Maximum number of tokens that are compared to find the length of a match."""


class ProposerName(StrEnum):
    """The names of the proposers; metrics count draft tokens by these names."""

    NGRAM = "ngram"
    """Proposes the tokens after an earlier occurrence of the last tokens in the same request."""
    SUFFIX = "suffix"
    """Proposes the tokens after an occurrence of the last tokens in an earlier output for the same tenant."""
    MEDUSA = "medusa"
    DRAFT_MODEL = "draft_model"
    EAGLE = "eagle"
    MTP = "mtp"
    """The multi-token prediction layer of the model's own checkpoint."""


class DraftSource(NamedTuple):
    """The source of a draft; drafts of equal sources are assumed to have the same acceptance probability."""

    proposer: ProposerName
    match: int = 0
    """The number of last tokens that the lookup matched, at most `MATCH_MAX`; 0 = the proposer does no lookup."""


DRAFT_SOURCES = (
    *(DraftSource(ProposerName.NGRAM, match) for match in range(1, MATCH_MAX + 1)),
    *(DraftSource(ProposerName.SUFFIX, match) for match in range(1, NGRAM_MAX + 1)),
    *(DraftSource(name) for name in ProposerName if name not in {ProposerName.NGRAM, ProposerName.SUFFIX}),
)
"""All possible sources of drafts."""


class Draft(NamedTuple):
    """The draft tokens proposed to follow the newest token of a request."""

    token_ids: Sequence[int]
    """The draft tokens, at most as many as requested; may be empty."""
    source: DraftSource


NO_DRAFT = Draft((), DraftSource(ProposerName.NGRAM))


class Proposer(Protocol):
    """Proposes draft tokens for running requests, which are named by keys. Only one thread uses a proposer.

    The proposer owns the state of a request from `begin` to `leave`.
    """

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str) -> None:
        """Add a request, with the tokens of its prompt and of its output so far.

        A proposer never uses the tokens of a request for requests with another `cache_salt`. Raises ValueError if the
        key exists already.
        """

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """Append new output tokens of a request."""

    def propose(self, key: Hashable, most: int) -> Draft:
        """Return at most `most` draft tokens that follow the request's newest token."""

    def leave(self, key: Hashable) -> None:
        """Remove a request and its state."""


@dataclass(frozen=True, slots=True)
class WantedDraft:
    """A decoding request that needs a draft, and the sampling inputs of the tokens that the draft predicts."""

    key: Hashable
    draws: Sequence[SamplingInput]
    """One sampling input per draft position, at least one.

    With these inputs the target model will sample the tokens that the draft predicts.
    """
    rows: Sequence[int] = ()
    """The rows of the engine's newest step that sampled the request's newest tokens, in token order.

    Empty if that step had no decode row of the request, as directly after a prompt, a hand-over or a preemption.
    """


class BatchProposer(Proposer):
    """A proposer that computes draft tokens with trained weights, for all requests of a step at once.

    Computing draft tokens lengthens the step, which is worthwhile only if accepted draft tokens save more time. So the
    number of draft tokens is decided before the proposer runs. A proposer with its own KV can propose for a request
    only once the KV of the request's context is stored; `missing`, `capacity` and `store_context` are for these
    proposers.
    """

    source: DraftSource
    """The source of its drafts."""
    longest: int = DRAFTS_MAX
    """Maximum number of tokens in a draft."""
    max_step_tokens: int
    """Maximum number of tokens of a step that computes KV, and of the first step of a draft."""
    memory: Mapping[str, int] = MappingProxyType({})
    """The memory in bytes of the `weights` and, for a proposer with its own KV, of the `kv` pages."""

    @property
    @abstractmethod
    def cost(self) -> StepCost:
        """The cost model of the proposer's steps, with its newest fit.

        The proposer runs one step for each token of the longest draft.
        """

    def missing(self, key: Hashable) -> int:
        """Return the number of the request's tokens whose KV is not stored, including the newest token."""
        del key
        return 1

    def missing_at_first(self, tokens: int) -> int:
        """Return the value that `missing` will have right after a request with `tokens` tokens begins."""
        return tokens

    def capacity(self, key: Hashable, drafts: int) -> int:
        """Return how many of `drafts` draft tokens fit into memory, and reserve memory for them; 0 if there is none."""
        del key
        return drafts

    def store_context(self, pieces: Mapping[Hashable, int]) -> None:
        """Compute and store, in one step, the KV of the given number of missing tokens of each request.

        Each request has memory for these tokens (`capacity`), and is missing more tokens than this number.
        """

    @abstractmethod
    def compute(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        """Return the draft tokens of each request, at most one per sampling input.

        A draft may be empty, and has at most the length that `capacity` returned. The caller ensures that no step of
        the engine is in flight. The call also stores the KV of all missing tokens, which should be few.
        """

    def propose(self, key: Hashable, most: int) -> Draft:
        """Return a greedily sampled draft of at most `most` tokens, without using hidden states of the target model."""
        draws = [SamplingInput(SamplingParams(max_tokens=1), 0)] * most
        return Draft(self.compute([WantedDraft(key, draws)])[0], self.source)
