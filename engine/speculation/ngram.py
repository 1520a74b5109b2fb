"""Prompt look-up: what followed the last tokens when they occurred before in the same request.

It costs no computation of the model, and answers that repeat their prompt, or themselves, are guessed well: edits,
summaries, code (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from collections.abc import Hashable, Sequence

from engine.speculation.proposer import NO_DRAFT, Draft

LONGEST = 3
"""The longest n-gram that is looked up, before those of 2 and 1 tokens."""
MATCH_MAX = 8
"""The longest match that is told apart."""
NOTED_MAX = 8192
"""The tokens that are looked up when a request begins, the newest: more would delay the step of all requests."""
_NONE = -1
"""No token; a history begins with as many as the longest n-gram has, so that each token has an n-gram before it."""


class _History:
    """The tokens of one request and, for each n-gram, the position behind its newest occurrence but the last one."""

    __slots__ = ("_noted", "_positions", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = [_NONE] * LONGEST
        self.tokens += tokens[-NOTED_MAX:]
        self._noted = LONGEST
        self._positions: dict[int | tuple[int, ...], int] = {}

    def find(self) -> int | None:
        """Return the position that followed the last tokens when they occurred before."""
        self._note()
        x, y, z = self.tokens[-3:]
        known = self._positions.get
        return known((x, y, z)) or known((y, z)) or known(z)

    def match(self, position: int) -> int:
        """Return how many tokens before `position` equal the last ones, at most MATCH_MAX."""
        tokens, length = self.tokens, 1
        while length < MATCH_MAX and tokens[position - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    def _note(self) -> None:
        """Note the n-grams that are followed by tokens which are new."""
        tokens, start, end = self.tokens, self._noted, len(self.tokens)
        positions = self._positions
        x, y, z = tokens[start - 3 : start]
        for position in range(start, end):
            positions[x, y, z] = positions[y, z] = positions[z] = position
            x, y, z = y, z, tokens[position]
        self._noted = end


class NgramProposer:
    """Proposes what followed the newest occurrence of the request's last tokens, in its prompt or its answer."""

    def __init__(self) -> None:
        self._histories: dict[Hashable, _History] = {}

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """See `Proposer`; the n-grams are noted when a draft is first asked for."""
        if key in self._histories:
            raise ValueError(f"{key} is known already")
        self._histories[key] = _History(token_ids)

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """See `Proposer`."""
        self._histories[key].tokens.extend(token_ids)

    def propose(self, key: Hashable, most: int) -> Draft:
        """See `Proposer`; a match that reaches the newest token is continued by its own draft."""
        history = self._histories[key]
        position = history.find()
        if position is None:
            return NO_DRAFT
        tokens = history.tokens
        draft = tokens[position : position + most]
        period = len(tokens) - position
        while len(draft) < most:
            draft.append(draft[len(draft) - period])
        return Draft(draft, history.match(position))

    def leave(self, key: Hashable) -> None:
        """See `Proposer`."""
        del self._histories[key]
