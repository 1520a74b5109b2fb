"""The syntax in which Gemma 4 writes tool calls: `<|tool_call>call:NAME{KEY:VALUE,…}<tool_call|>`.

Values are nested as in JSON, but keys have no quotes, and strings stand between two `<|"|>`, without escapes. The
arguments are converted to JSON. The form is that of Gemma's chat template.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from router.text.answer_syntax.json_call import read_end
from router.text.answer_syntax.parser import AnswerParts
from router.text.answer_syntax.reader import CLOSING, AnswerReader, Steps
from router.text.answer_syntax.tagged_calls import as_json, quoted, read_string

CALL, CALL_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"[\w.-]+")
_PYTHON_WORDS = frozenset({"boolean", "null"})
"""The JSON types whose Python words are converted: Gemma's chat template writes null as `None`."""


def read_gemma(reader: AnswerReader, parts: AnswerParts, _names: Collection[str]) -> Steps[None]:
    """Read Gemma 4's calls."""
    while (yield from reader.until((CALL,), parts.content)):
        before = [CALL, (yield from reader.space()), (yield from reader.literal("call:"))]
        name: list[str] = []
        end = (yield from reader.until(("{", "<", "\n"), name.append)) if before[-1] else ""
        called = "".join(name).strip()
        if end != "{" or not _NAME.fullmatch(called):
            parts.content("".join([*before, *name, end]))
            continue
        parts.begin_call(called)
        if (yield from _read_object(reader, parts)):
            yield from read_end(reader, parts, CALL_END)
            yield from reader.space()


def _read_object(reader: AnswerReader, parts: AnswerParts) -> Steps[bool]:
    """Read the rest of an object after its opening bracket, and add it to the arguments as JSON.

    A list of the open brackets replaces recursion, because models may nest values without limit. Returns False if
    invalid text or the answer's end comes first.
    """
    closings, comma = ["}"], ""
    parts.arguments("{")
    while closings:
        yield from reader.space()
        if comma and (yield from reader.literal(",")):
            yield from reader.space()
        if (yield from reader.literal(closings[-1])):
            parts.arguments(closings.pop())
        else:
            parts.arguments(comma)
            if closings[-1] == "}" and not (yield from _read_key(reader, parts)):
                return False
            bracket = yield from reader.literal("{", "[")
            if bracket:
                parts.arguments(bracket)
                closings.append(CLOSING[bracket])
                comma = ""
                continue
            if not (yield from _read_scalar(reader, parts)):
                return False
        comma = ", "
    return True


def _read_key(reader: AnswerReader, parts: AnswerParts) -> Steps[bool]:
    key = (yield from reader.before(":{}[]")).replace(QUOTE, "").strip()
    if not (yield from reader.literal(":")):
        return False
    parts.arguments(f"{quoted(key)}: ")
    yield from reader.space()
    return True


def _read_scalar(reader: AnswerReader, parts: AnswerParts) -> Steps[bool]:
    if (yield from reader.literal(QUOTE)):
        return (yield from read_string(reader, parts, (QUOTE,)))
    text = (yield from reader.before(",{}[]")).strip()
    parts.arguments(as_json(text, _PYTHON_WORDS) if text else "")
    return bool(text)
