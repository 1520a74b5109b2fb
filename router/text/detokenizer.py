"""Incremental detokenization: the pieces of text join to the text of all ids, and no piece ends inside a character.

A token may contain part of a character, and some tokenizers decode a token differently at the start of a text.
Therefore each piece is the difference of two decodings that start at the same token: that of a window of recent tokens,
whose text is already emitted, and that of the window plus the new tokens.
"""

from collections.abc import Callable, Sequence

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_WINDOW_MAX = 32
"""Number of pending tokens after which an incomplete character is emitted as it is; real characters have fewer."""


class Detokenizer:
    """The incremental detokenizer of one answer. Not thread-safe."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        """Tokens whose text is emitted, as context for decoding, followed by the pending tokens."""
        self._read = 0
        """Number of tokens at the start of the window whose text has been emitted."""
        self._prefix_chars = 0
        """Number of characters in the decoded text of the window's emitted tokens."""

    def add_all(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that became final.

        The tokens are decoded together if their text ends with a complete character, else one by one.
        """
        if len(token_ids) == 1:
            return self.add(token_ids[0])
        text = self._decode([*self._window, *token_ids])
        if len(text) <= self._prefix_chars or text.endswith(_BROKEN):
            return "".join(map(self.add, token_ids))
        last = self._decode(token_ids[-1:])
        if not last or last.startswith(_BROKEN):  # the last token begins inside a character
            self._window.extend(token_ids)
            return self._emit(text)
        piece = text[self._prefix_chars :]
        self._window, self._read, self._prefix_chars = [token_ids[-1]], 1, len(last)
        return piece

    def add(self, token_id: int) -> str:
        """Add a token and return the text that became final; "" while a character is incomplete."""
        self._window.append(token_id)
        text = self._decode(self._window)
        pending = len(self._window) - self._read
        if len(text) <= self._prefix_chars or (text.endswith(_BROKEN) and pending < _WINDOW_MAX):
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """Return the remaining text at the end of the answer; an incomplete character becomes U+FFFD."""
        return self._emit(self._decode(self._window)) if self._read < len(self._window) else ""

    def _emit(self, text: str) -> str:
        piece = text[self._prefix_chars :]
        del self._window[: self._read]
        self._read = len(self._window)
        self._prefix_chars = len(self._decode(self._window))
        return piece
