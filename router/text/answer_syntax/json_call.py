"""Reads a tool call that is one JSON object: `{"name": …, "arguments": {…}}`."""

from __future__ import annotations

import json
from collections.abc import Collection

from router.text.answer_syntax.parser import AnswerParts
from router.text.answer_syntax.reader import AnswerReader, JsonScan, Steps

_ARGUMENTS = ("arguments", "parameters")


def read_call(
    reader: AnswerReader, parts: AnswerParts, before: list[str], names: Collection[str] | None = None
) -> Steps[bool]:
    """Read one call; return False if the text is not a call.

    Text that is not a call becomes content, after the texts in `before`. If the name comes first, as models are trained
    to write, the arguments are passed on while they are generated; otherwise the whole call is read first. `names` are
    the functions that may be called; None = any.
    """
    head: list[str] = []
    name = yield from _read_head(reader, head)
    if name and (names is None or name in names):
        parts.begin_call(name)
        if (yield from reader.json(JsonScan(), parts.arguments)):
            yield from read_end(reader, parts, "}")
        return True
    scan = JsonScan()
    text = "".join(head)
    if scan.add(text) == len(text):
        yield from reader.json(scan, head.append)
    call = _parsed("".join(head)) if scan.complete else None
    if call is None or (names is not None and call[0] not in names):
        parts.content("".join([*before, *head]))
        return False
    parts.begin_call(call[0])
    parts.arguments(call[1])
    return True


def read_end(reader: AnswerReader, parts: AnswerParts, *ends: str) -> Steps[None]:
    """Read the closing texts `ends` of a call in order, and the white space before each.

    Reading stops at the first text that does not match; the white space before it becomes content.
    """
    for end in ends:
        space = yield from reader.space()
        if not (yield from reader.literal(end)):
            parts.content(space)
            return


def _read_head(reader: AnswerReader, head: list[str]) -> Steps[str]:
    """Read a call up to the opening bracket of its arguments; return the function's name, or "" if it is not a call.

    The text that has been read is appended to `head`.
    """

    def expect(*options: str) -> Steps[bool]:
        head.append((yield from reader.space()) if len(head) else "")
        head.append((yield from reader.literal(*options)))
        return bool(head[-1])

    for text in ("{", '"name"', ":", '"'):
        if not (yield from expect(text)):
            return ""
    at = len(head)
    head.append((yield from reader.until(('"', "\\"), head.append)))
    name = "".join(head[at:-1])
    if head[-1] != '"' or not (yield from expect(",")):
        return ""
    if not (yield from expect(*(f'"{key}"' for key in _ARGUMENTS))) or not (yield from expect(":")):
        return ""
    head.append((yield from reader.space()))
    return name if (yield from reader.ahead("{")) else ""


def _parsed(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments (as JSON) of a complete call; None if `text` is not a call."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = next((call[key] for key in _ARGUMENTS if isinstance(call.get(key), dict)), None)
    return None if arguments is None else (call["name"], json.dumps(arguments, ensure_ascii=False))
