"""Stop strings: text that ends an answer and is not part of it, found across the borders of pieces."""

from collections.abc import Sequence


class StopStrings:
    """Watches one answer for its stop strings, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = ""
        """The stop string that ended the answer, "" so far."""

    def add(self, piece: str) -> str:
        """The text that may go out now; after a match, what stood before the stop string."""
        if not self._stops or not piece:
            return piece
        text = self._held + piece
        at, stop = min(
            ((text.find(stop), stop) for stop in self._stops if stop in text),
            key=lambda hit: (hit[0], -len(hit[1])),
            default=(-1, ""),
        )
        if stop:
            self.matched, self._held = stop, ""
            return text[:at]
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
