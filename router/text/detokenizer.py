"""Token ids to text, a few at a time: the pieces joined are the text of all ids, and no piece ends inside a character.

A token may hold part of a character, and some tokenizers write a token differently at the start of a text. So each
piece is the difference of two decodings that start at the same clean place: the window `ids[start:]`, which begins
with tokens whose text is out already, with and without the new tokens.
"""

from collections.abc import Callable, Sequence

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_WINDOW_MAX = 32
"""Tokens after which text that still ends in a broken character is let out: no character spans that many."""


class Detokenizer:
    """Incremental decoding of one answer. Not for several threads at once."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._read = 0
        self._prefix_chars = 0

    def add(self, token_id: int) -> str:
        """The text that became certain with this token; often its own, "" while a character is incomplete."""
        self._window.append(token_id)
        text = self._decode(self._window)
        pending = len(self._window) - self._read
        if len(text) <= self._prefix_chars or (text.endswith(_BROKEN) and pending < _WINDOW_MAX):
            return ""
        return self._let_out(text)

    def flush(self) -> str:
        """The rest at the end of the answer; an incomplete character becomes U+FFFD, as in a whole decoding."""
        return self._let_out(self._decode(self._window)) if self._read < len(self._window) else ""

    def _let_out(self, text: str) -> str:
        piece = text[self._prefix_chars :]
        del self._window[: self._read]
        self._read = len(self._window)
        self._prefix_chars = len(self._decode(self._window))
        return piece
