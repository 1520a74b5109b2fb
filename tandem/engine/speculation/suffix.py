"""Looks up draft tokens in the request itself and in earlier outputs of the same tenant.

It resembles SuffixDecoding (arXiv 2411.04975). Instead of a suffix tree with counts, it has a table that maps each
n-gram to its newest occurrence. A tree would find the most frequent continuation instead of the newest, but on outputs
of SmolLM2 that gains at most 2 % more tokens per step.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tandem.engine.speculation.ngram_history import Ngram, NgramHistory
from tandem.engine.speculation.proposer import NGRAM_MAX, NO_DRAFT, Draft, DraftSource, ProposerName

ANSWERS_MAX = 65_536
"""Maximum number of tokens of earlier outputs that are kept, for all tenants together.

The oldest outputs are dropped whole.
"""

_Occurrence = tuple[list[int], int]
"""The tokens of an output, and the position in them that follows an n-gram."""


@dataclass(slots=True, eq=False)
class _Request:
    history: NgramHistory
    cache_salt: str
    answer: int
    """The position in `history` of the first token that was appended after `begin`."""


class _Answers:
    """The outputs of finished requests; an output is found only by requests with the same cache salt."""

    def __init__(self) -> None:
        self._answers: deque[tuple[str, list[int]]] = deque()
        """The outputs with their cache salts, oldest first.

        The tokens of an output are preceded by the NGRAM_MAX tokens before the output.
        """
        self._occurrences: dict[str, dict[Ngram, _Occurrence]] = {}
        self.tokens = 0
        """The total number of tokens of all outputs, at most ANSWERS_MAX."""

    def occurrences(self, cache_salt: str) -> dict[Ngram, _Occurrence]:
        """Return, for each n-gram in the tenant's outputs, its newest occurrence."""
        return self._occurrences.get(cache_salt, {})

    def add(self, cache_salt: str, tokens: list[int]) -> None:
        """Add an output, and drop the oldest outputs while there are more than ANSWERS_MAX tokens."""
        occurrences = self._occurrences.setdefault(cache_salt, {})
        for position in range(NGRAM_MAX, len(tokens)):
            occurrence = tokens, position
            for ngram in _ngrams(tokens, position):
                occurrences[ngram] = occurrence
        self._answers.append((cache_salt, tokens))
        self.tokens += len(tokens) - NGRAM_MAX
        while self.tokens > ANSWERS_MAX:
            self._drop(*self._answers.popleft())

    def _drop(self, cache_salt: str, tokens: list[int]) -> None:
        occurrences = self._occurrences[cache_salt]
        for position in range(NGRAM_MAX, len(tokens)):
            for ngram in _ngrams(tokens, position):
                occurrence = occurrences.get(ngram)
                if occurrence is not None and occurrence[0] is tokens:
                    del occurrences[ngram]
        if not occurrences:
            del self._occurrences[cache_salt]
        self.tokens -= len(tokens) - NGRAM_MAX


def _ngrams(tokens: Sequence[int], position: int) -> tuple[Ngram, Ngram, Ngram]:
    x, y, z = tokens[position - NGRAM_MAX : position]
    return (x, y, z), (y, z), z


class SuffixProposer:
    """Proposes the tokens that followed a request's last tokens earlier, in the request or in outputs of its tenant.

    The longest n-gram with a match is used; of equally long ones, the match in the request itself. An output that
    repeats an earlier one is generated faster, which would reveal the earlier one to another tenant. Tenants therefore
    never share outputs. Requests with the same cache salt are one tenant, and so are all requests without a salt.
    """

    def __init__(self) -> None:
        self._requests: dict[Hashable, _Request] = {}
        self._answers = _Answers()

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str) -> None:
        """Add a request, as `Proposer.begin` describes.

        Its n-grams are indexed only when the first draft is requested.
        """
        if key in self._requests:
            raise ValueError(f"{key} is known already")
        history = NgramHistory(token_ids)
        self._requests[key] = _Request(history, cache_salt, len(history.tokens))

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """Append tokens to a request, as `Proposer.extend` describes."""
        self._requests[key].history.tokens.extend(token_ids)

    def propose(self, key: Hashable, most: int) -> Draft:
        """Return at most `most` draft tokens, as `Proposer.propose` describes."""
        request = self._requests[key]
        history, occurrences = request.history, self._answers.occurrences(request.cache_salt)
        for shorter, ngram in enumerate(history.last()):
            if position := history.positions.get(ngram):
                return history.draft(position, most)
            if occurrence := occurrences.get(ngram):
                tokens, position = occurrence
                source = DraftSource(ProposerName.SUFFIX, NGRAM_MAX - shorter)
                return Draft(tokens[position : position + most], source)
        return NO_DRAFT

    def leave(self, key: Hashable) -> None:
        """Remove a request; the tokens appended since `begin` are kept for later requests of the tenant."""
        request = self._requests.pop(key)
        tokens = request.history.tokens[request.answer - NGRAM_MAX :]
        if len(tokens) > NGRAM_MAX:
            self._answers.add(request.cache_salt, tokens)
