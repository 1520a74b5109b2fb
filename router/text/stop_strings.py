"""Stop strings: texts that end an answer; a stop string is found even if it spans several pieces of text."""

from collections.abc import Sequence


class StopStrings:
    """Searches one answer for stop strings, and holds back text that may be the beginning of one."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include` is True if the stop string that ends the answer is part of the answer."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched = ""
        """The stop string that ended the answer; "" if no stop string has been found."""

    @property
    def any(self) -> bool:
        """True if the answer has any stop strings."""
        return bool(self._stops)

    def add(self, piece: str, *, may_match: bool = True) -> str:
        """Add a piece of text, and return the text that may be sent now.

        If a stop string is found, this is the text before it, plus the stop string if it is included. A stop string
        that ends in a piece with `may_match` False counts as ordinary text.
        """
        if not self._stops or not piece:
            return piece
        text = self._held + piece
        hits = ((text.find(stop, max(0, len(self._held) - len(stop) + 1)), stop) for stop in self._stops)
        at, stop = min((hit for hit in hits if hit[0] >= 0), key=lambda hit: (hit[0], -len(hit[1])), default=(-1, ""))
        if stop and may_match:
            self.matched, self._held = stop, ""
            return text[: at + len(stop)] if self._include else text[:at]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text that is still held back; called at the end of an answer without a stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
