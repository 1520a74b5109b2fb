"""The interface of all proposers."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

HEADS_CLASS = 12
"""The class of the drafts of Medusa heads."""
LAST_CLASS = HEADS_CLASS
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
