"""Reads an answer's text as it is generated.

Parsers are generators: each `yield` waits for more text, so a parser can be written as if it had the whole answer.
All text is scanned once, except for the few characters that may begin a marker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from router.text.stop_strings import overlap

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""A generator that yields when it needs more text, and returns a result."""

_UNQUOTED = re.compile(r"[\s\w+\-.,:]*")
_QUOTED = re.compile(r'[^"\\]*')
CLOSING = {"{": "}", "[": "]"}


class AnswerReader:
    """The text of one answer that has been generated but not yet read. The `AnswerParser` owns it."""

    def __init__(self) -> None:
        self._text = ""
        self._over = False

    def add(self, piece: str) -> None:
        """Append generated text."""
        self._text += piece

    def end(self) -> None:
        """Record that no more text follows."""
        self._over = True

    def rest(self) -> str:
        """Read and return all text that has been added but not read."""
        text, self._text = self._text, ""
        return text

    def until(self, markers: Sequence[str], to: Callable[[str], None]) -> Steps[str]:
        """Read up to and including the first of `markers`, and call `to` with the text before it.

        Returns the marker, or "" at the end of the answer. No marker may contain another marker.
        """
        while True:
            matches = [(at, marker) for marker in markers if (at := self._text.find(marker)) >= 0]
            if matches:
                at, marker = min(matches)
                to(self._take(at))
                self._take(len(marker))
                return marker
            keep = 0 if self._over else max((overlap(self._text, marker) for marker in markers), default=0)
            to(self._take(len(self._text) - keep))
            if self._over:
                return ""
            yield

    def literal(self, *options: str) -> Steps[str]:
        """Read and return one of `options` if the text continues with it; else read nothing and return ""."""
        while True:
            for option in options:
                if self._text.startswith(option):
                    return self._take(len(option))
            if self._over or not any(option.startswith(self._text) for option in options):
                return ""
            yield

    def ahead(self, sign: str) -> Steps[bool]:
        """Return True if the next character is `sign`, without reading that character."""
        while not self._text and not self._over:
            yield
        return self._text.startswith(sign)

    def space(self) -> Steps[str]:
        """Read and return white space, up to the next other character or the end of the answer."""
        parts = []
        while True:
            parts.append(self._take(len(self._text) - len(self._text.lstrip())))
            if self._text or self._over:
                return "".join(parts)
            yield

    def before(self, signs: str) -> Steps[str]:
        """Read and return the text before the next of the characters `signs`; "" if the answer ends first."""
        parts = []
        while True:
            at = min((at for sign in signs if (at := self._text.find(sign)) >= 0), default=len(self._text))
            parts.append(self._take(at))
            if self._text or self._over:
                return "".join(parts) if self._text else ""
            yield

    def json(self, scan: JsonScan, to: Callable[[str], None]) -> Steps[bool]:
        """Read the rest of a JSON value, whose beginning `scan` has seen, and call `to` with its text.

        Returns True at the end of the value, False if invalid text or the end of the answer comes first.
        """
        while True:
            to(self._take(scan.add(self._text)))
            if scan.complete or scan.broken or self._over:
                return scan.complete
            yield

    def _take(self, count: int) -> str:
        text, self._text = self._text[:count], self._text[count:]
        return text


class JsonScan:
    """Finds the end of a JSON object or array by its quotes and brackets, without parsing the JSON."""

    def __init__(self) -> None:
        self._open: list[str] = []
        """The closing brackets that are still missing, the innermost last."""
        self._quoted = False
        self._escaped = False
        self.complete = False
        self.broken = False
        """True if the text is not JSON: a bracket does not match, or a character is not allowed outside of quotes."""

    def add(self, text: str) -> int:
        """Scan more text, and return the number of its characters that belong to the value."""
        at = 0
        while at < len(text) and not (self.complete or self.broken):
            at = self._in_quotes(text, at) if self._quoted else self._outside(text, at)
        return at

    def _in_quotes(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        match = _QUOTED.match(text, at)
        at = match.end() if match else at
        if at == len(text):
            return at
        self._escaped = text[at] == "\\"
        self._quoted = self._escaped
        return at + 1

    def _outside(self, text: str, at: int) -> int:
        match = _UNQUOTED.match(text, at) if self._open else None
        at = match.end() if match else at
        if at == len(text):
            return at
        sign = text[at]
        if sign == '"' and self._open:
            self._quoted = True
        elif sign in CLOSING:
            self._open.append(CLOSING[sign])
        elif self._open and sign == self._open[-1]:
            self._open.pop()
            self.complete = not self._open
        else:
            self.broken = True
            return at
        return at + 1
