"""Stop strings: text that ends an answer, found across the borders of pieces."""

from collections.abc import Sequence


class StopStrings:
    """Watches one answer for its stop strings, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the one that matches is part of the answer."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched = ""
        """The stop string that ended the answer, "" so far."""

    def add(self, piece: str, *, may_match: bool = True) -> str:
        """The text that may go out now; after a match, what stood before the stop string, and that too if it is
        included. A stop string whose end comes where none `may_match` is text.
        """
        if not self._stops or not piece:
            return piece
        text = self._held + piece
        found = ((text.find(stop, max(0, len(self._held) - len(stop) + 1)), stop) for stop in self._stops)
        at, stop = min((hit for hit in found if hit[0] >= 0), key=lambda hit: (hit[0], -len(hit[1])), default=(-1, ""))
        if stop and may_match:
            self.matched, self._held = stop, ""
            return text[: at + len(stop)] if self._include else text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, at an end that no stop string made."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and shorter than it."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
