"""Look-up in the request and in earlier answers of the same tenant.

As SuffixDecoding (arXiv 2411.04975), but instead of a suffix tree with counts it has a table of n-grams that knows the
newest occurrence: over SmolLM2's answers, the most frequent continuation gains at most 2 % more tokens a step.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tandem.engine.speculation.ngram_history import Ngram, NgramHistory
from tandem.engine.speculation.proposer import NGRAM_MAX, NO_DRAFT, Draft, DraftSource, ProposerName

ANSWERS_MAX = 65_536
"""The most tokens of answers that are kept, of all tenants together; the oldest answers are dropped whole."""

_Place = tuple[list[int], int]
"""An answer's tokens, and the position behind an n-gram in them."""


@dataclass(slots=True, eq=False)
class _Request:
    history: NgramHistory
    cache_salt: str
    answer: int
    """The position in the history of the first token that joined after it began."""


class _Answers:
    """Answers of requests that left, each found only by requests of the same cache salt."""

    def __init__(self) -> None:
        self._answers: deque[tuple[str, list[int]]] = deque()
        """The oldest first, each with its salt and, before its own tokens, the NGRAM_MAX ones that it follows."""
        self._places: dict[str, dict[Ngram, _Place]] = {}
        self.tokens = 0
        """The tokens of all answers, at most ANSWERS_MAX."""

    def places(self, cache_salt: str) -> dict[Ngram, _Place]:
        """Return the newest place behind each n-gram of a tenant's answers."""
        return self._places.get(cache_salt, {})

    def add(self, cache_salt: str, tokens: list[int]) -> None:
        """Keep an answer, which takes the place of the oldest ones."""
        places = self._places.setdefault(cache_salt, {})
        for position in range(NGRAM_MAX, len(tokens)):
            place = tokens, position
            for ngram in _ngrams(tokens, position):
                places[ngram] = place
        self._answers.append((cache_salt, tokens))
        self.tokens += len(tokens) - NGRAM_MAX
        while self.tokens > ANSWERS_MAX:
            self._drop(*self._answers.popleft())

    def _drop(self, cache_salt: str, tokens: list[int]) -> None:
        places = self._places[cache_salt]
        for position in range(NGRAM_MAX, len(tokens)):
            for ngram in _ngrams(tokens, position):
                place = places.get(ngram)
                if place is not None and place[0] is tokens:
                    del places[ngram]
        if not places:
            del self._places[cache_salt]
        self.tokens -= len(tokens) - NGRAM_MAX


def _ngrams(tokens: Sequence[int], position: int) -> tuple[Ngram, Ngram, Ngram]:
    x, y, z = tokens[position - NGRAM_MAX : position]
    return (x, y, z), (y, z), z


class SuffixProposer:
    """Proposes what followed the request's last tokens in itself, else in an earlier answer for the same cache salt.

    Longer matches go before those of the request. How fast an answer comes tells what is in the answers that it is
    guessed from; tenants therefore never share them, and requests without a salt are one tenant.
    """

    def __init__(self) -> None:
        self._requests: dict[Hashable, _Request] = {}
        self._answers = _Answers()

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str) -> None:
        """See `Proposer`; the n-grams are noted when a draft is first asked for."""
        if key in self._requests:
            raise ValueError(f"{key} is known already")
        history = NgramHistory(token_ids)
        self._requests[key] = _Request(history, cache_salt, len(history.tokens))

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """See `Proposer`."""
        self._requests[key].history.tokens.extend(token_ids)

    def propose(self, key: Hashable, most: int) -> Draft:
        """See `Proposer`."""
        request = self._requests[key]
        history, places = request.history, self._answers.places(request.cache_salt)
        for shorter, ngram in enumerate(history.last()):
            if position := history.positions.get(ngram):
                return history.draft(position, most)
            if place := places.get(ngram):
                tokens, position = place
                source = DraftSource(ProposerName.SUFFIX, NGRAM_MAX - shorter)
                return Draft(tokens[position : position + most], source)
        return NO_DRAFT

    def leave(self, key: Hashable) -> None:
        """See `Proposer`; what joined the answer since `begin` may serve later requests of the tenant."""
        request = self._requests.pop(key)
        tokens = request.history.tokens[request.answer - NGRAM_MAX :]
        if len(tokens) > NGRAM_MAX:
            self._answers.add(request.cache_salt, tokens)
