"""Prompt look-up: what followed the last tokens when they occurred before in the same request.

It costs no computation of the model, and answers that repeat their prompt, or themselves, are guessed well: edits,
summaries, code (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from collections.abc import Hashable, Sequence

from engine.speculation.proposer import NO_DRAFT, Draft

LENGTHS = (3, 2)
"""The lengths of a match that are looked up, the longest first."""
MATCH_MAX = 8
"""The longest match that is told apart."""
_MANY = 16
"""New tokens from which on all are noted at once."""


class _History:
    """The tokens of one request and, for each n-gram, the position behind its newest occurrence but the last one."""

    __slots__ = ("_indexed", "_positions", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self._indexed = 0
        self._positions: list[dict[tuple[int, ...], int]] = [{} for _ in LENGTHS]

    def find(self) -> int | None:
        """Return the position that followed the last tokens when they occurred before."""
        tokens = self.tokens
        if self._indexed < len(tokens):
            self._index()
        for length, positions in zip(LENGTHS, self._positions, strict=True):
            found = positions.get(tuple(tokens[-length:]))
            if found is not None:
                return found
        return None

    def match(self, position: int) -> int:
        """Return how many tokens before `position` equal the last ones, at most MATCH_MAX."""
        tokens, length = self.tokens, LENGTHS[-1]
        most = min(MATCH_MAX, position)
        while length < most and tokens[position - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    def _index(self) -> None:
        """Note the n-grams that are followed by tokens which are new."""
        tokens, start, end = self.tokens, self._indexed, len(self.tokens)
        for length, positions in zip(LENGTHS, self._positions, strict=True):
            if end - start > _MANY:
                first = max(start, length)
                parts = (tokens[first - length + part : end] for part in range(length))
                positions.update(zip(zip(*parts, strict=False), range(first, end), strict=False))
            else:
                for position in range(max(start, length), end):
                    positions[tuple(tokens[position - length : position])] = position
        self._indexed = end


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
