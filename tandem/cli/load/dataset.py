"""Prompts from the user's own file, one JSON object per line; the file is repeated as often as necessary."""

import json
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from tandem.cli.load.synthetic import Lengths, due_times
from tandem.cli.load.trace import read_trace
from tandem.cli.load.workload import Arrival, Source, Workload
from tandem.protocol.errors import InvalidArgument

Messages = tuple[tuple[str, str], ...]
_ANSWER_FIELDS = ("max_tokens", "output_length")


@dataclass(frozen=True, slots=True)
class Prompts:
    """Conversations with random arrival times: one per line of the file, with its answer length if the line gives one.

    The other answer lengths are random, with the distribution `answer`.
    """

    name: str
    lines: tuple[tuple[Messages, int | None], ...]
    answer: Lengths
    cv: float = 1.0

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        """Return a workload with the lines in order, repeated as often as necessary.

        The seed determines the arrival times and the random answer lengths.
        """
        moments, answers = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2))
        due = due_times(moments, self.cv, rate, seconds)
        drawn = self.answer.draw(answers, len(due))
        arrivals = tuple(
            Arrival(at, (), asked or length, messages)
            for at, (messages, asked), length in zip(due, islice(cycle(self.lines), len(due)), drawn, strict=True)
        )
        return Workload(self.name, rate, seconds, seed, arrivals)


def read_dataset(file: Path, answer: Lengths, cv: float = 1.0) -> Source:
    """Read a file of prompts (`prompt` or `messages` in each line) or a trace.

    Raises InvalidArgument, which names the wrong line.
    """
    if file.suffix == ".csv" or "timestamp" in _first_line(file):
        return read_trace(file)
    lines = tuple(
        _line(f"{file.name} line {number}", line)
        for number, line in enumerate(_text(file).splitlines(), 1)
        if line.strip()
    )
    if not lines:
        raise InvalidArgument("--dataset", f"{file.name} has no prompts")
    return Prompts(file.stem, lines, answer, cv)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgument("--dataset", f"{file.name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidArgument("--dataset", f"{file.name} is not UTF-8") from None


def _first_line(file: Path) -> dict[str, Any]:
    for number, line in enumerate(_text(file).splitlines(), 1):
        if line.strip():
            return _fields(f"{file.name} line {number}", line)
    return {}


def _fields(where: str, line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InvalidArgument(where, f"is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidArgument(where, "is no JSON object")
    return fields


def _line(where: str, line: str) -> tuple[Messages, int | None]:
    fields = _fields(where, line)
    asked = next((fields[name] for name in _ANSWER_FIELDS if name in fields), None)
    if asked is not None and (type(asked) is not int or asked < 1):
        raise InvalidArgument(where, f"max_tokens {asked!r} is no number of tokens above 0")
    return _messages(where, fields), asked


def _messages(where: str, fields: dict[str, Any]) -> Messages:
    if isinstance(fields.get("prompt"), str) and fields["prompt"]:
        return (("user", fields["prompt"]),)
    listed = fields.get("messages")
    if not isinstance(listed, list) or not listed:
        raise InvalidArgument(where, "has neither a prompt nor messages")
    for message in listed:
        known = (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        )
        if not known:
            raise InvalidArgument(where, "has a message without a role or content in text")
    return tuple((message["role"], message["content"]) for message in listed)
