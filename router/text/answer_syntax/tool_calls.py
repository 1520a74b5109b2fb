"""The syntaxes in which models write tool calls with JSON arguments. White space around calls is dropped."""

from __future__ import annotations

import re
from collections.abc import Collection

from router.text.answer_syntax.json_call import read_call, read_end
from router.text.answer_syntax.parser import AnswerParts
from router.text.answer_syntax.reader import AnswerReader, JsonScan, Steps

_NAME = re.compile(r"[\w.-]+")
_HERMES, _HERMES_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def read_hermes(reader: AnswerReader, parts: AnswerParts, _names: Collection[str]) -> Steps[None]:
    """Read the calls of Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

    SmolLM2 writes a list of such objects between the tags.
    """
    while (yield from reader.until((_HERMES,), parts.content)):
        before = [_HERMES, (yield from reader.space())]
        if (yield from reader.literal("[")):
            called = yield from _read_list(reader, parts, [*before, "["])
        else:
            called = yield from read_call(reader, parts, before)
        if called:
            yield from read_end(reader, parts, _HERMES_END)
            yield from reader.space()


def read_llama(reader: AnswerReader, parts: AnswerParts, names: Collection[str]) -> Steps[None]:
    """Read Llama 3's calls: `{"name": …, "parameters": {…}}` as the whole answer, or after `<|python_tag|>`.

    An answer may be JSON without being a call, so it counts as a call only if the name is in `names`.
    """
    tag = ""
    while True:
        before = [tag, (yield from reader.space())]
        if not tag and (tag := (yield from reader.literal(PYTHON_TAG))):
            before = [*before, tag, (yield from reader.space())]
        while (yield from read_call(reader, parts, before, names)):
            space = yield from reader.space()
            before = [space, (yield from reader.literal(";")), (yield from reader.space())]
        tag = yield from reader.until((PYTHON_TAG,), parts.content)
        if not tag:
            return


def read_mistral(reader: AnswerReader, parts: AnswerParts, _names: Collection[str]) -> Steps[None]:
    """Read Mistral's calls: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`.

    Newer models write `[TOOL_CALLS]name[ARGS]{…}`.
    """
    while (yield from reader.until((TOOL_CALLS,), parts.content)):
        before = [TOOL_CALLS, (yield from reader.space())]
        if (yield from reader.literal("[")):
            yield from _read_list(reader, parts, [*before, "["])
        elif (yield from _read_named(reader, parts, before)):
            yield from reader.space()


def _read_list(reader: AnswerReader, parts: AnswerParts, before: list[str]) -> Steps[bool]:
    """Read the calls of a list up to its closing bracket; return False if other text comes first."""
    before.append((yield from reader.space()))
    while (yield from read_call(reader, parts, before)):
        space = yield from reader.space()
        sign = yield from reader.literal(",", "]")
        if sign != ",":
            parts.content("" if sign else space)
            return bool(sign)
        before = [space, sign, (yield from reader.space())]
    return False


def _read_named(reader: AnswerReader, parts: AnswerParts, before: list[str]) -> Steps[bool]:
    name: list[str] = []
    marker = yield from reader.until((ARGS, CALL_ID), name.append)
    after = [marker]
    if marker == CALL_ID:
        after.append((yield from reader.until((ARGS,), after.append)))
    return (
        yield from _read_arguments(reader, parts, "".join(name), [*before, *name, *after], marked=after[-1] == ARGS)
    )


def _read_arguments(
    reader: AnswerReader, parts: AnswerParts, name: str, before: list[str], *, marked: bool = True
) -> Steps[bool]:
    """Read the arguments of a call whose `name` has been read; return False if the text is not a call.

    It is not a call if the marker before the arguments is missing (`marked` is False), the name is invalid, or no
    object follows; then the text becomes content.
    """
    if marked:
        before = [*before, (yield from reader.space())]
    if not marked or _NAME.fullmatch(name.strip()) is None or not (yield from reader.ahead("{")):
        parts.content("".join(before))
        return False
    parts.begin_call(name.strip())
    yield from reader.json(JsonScan(), parts.arguments)
    return True


def read_deepseek(reader: AnswerReader, parts: AnswerParts, _names: Collection[str]) -> Steps[None]:
    """Read the calls of DeepSeek V3 and R1, whose arguments are in a ```json fence, and of V3.1, which has no fence."""
    while (yield from reader.until((CALLS_BEGIN,), parts.content)):
        before = [CALLS_BEGIN, (yield from reader.space())]
        while (yield from reader.literal(CALL_BEGIN)):
            called = yield from _read_fenced(reader, parts, [*before, CALL_BEGIN])
            before = [(yield from reader.space())] if called else []
        if (yield from reader.literal(CALLS_END)):
            before = [*before, CALLS_END] if CALLS_BEGIN in before else []
            yield from reader.space()
        parts.content("".join(before))


def _read_fenced(reader: AnswerReader, parts: AnswerParts, before: list[str]) -> Steps[bool]:
    name: list[str] = []
    marker = yield from reader.until((SEPARATOR,), name.append)
    before = [*before, *name, marker]
    fence = ""
    if "".join(name).strip() == "function":
        name = []
        before_fence = yield from reader.until(("```json",), name.append)
        before, marker, fence = [*before, *name, before_fence], before_fence, "```"
    called = yield from _read_arguments(reader, parts, "".join(name), before, marked=bool(marker))
    if called:
        yield from read_end(reader, parts, *([fence] if fence else []), CALL_END)
    return called
