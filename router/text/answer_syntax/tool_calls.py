"""The syntaxes in which models write tool calls with JSON arguments. White space around calls is dropped."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from router.text.answer_syntax.json_call import read_call, read_end
from router.text.answer_syntax.parser import AnswerParts
from router.text.answer_syntax.reader import AnswerReader, JsonScan, Steps

_NAME = re.compile(r"[\w.-]+")
_HERMES, _HERMES_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


@dataclass(frozen=True, slots=True)
class SectionMarkers:
    """The markers of a section of calls, each of which is a header, a separator and the arguments as JSON."""

    begin: str
    end: str
    call_begin: str
    call_end: str
    separator: str


DEEPSEEK = SectionMarkers(
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
)
KIMI = SectionMarkers(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
_KIMI_ID = re.compile(r"(?:functions\.)?([\w.-]+):\d+")


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
    reader: AnswerReader, parts: AnswerParts, name: str, before: list[str], *, marked: bool = True, call_id: str = ""
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
    parts.begin_call(name.strip(), call_id)
    yield from reader.json(JsonScan(), parts.arguments)
    return True


def read_deepseek(reader: AnswerReader, parts: AnswerParts, _names: Collection[str]) -> Steps[None]:
    """Read the calls of DeepSeek V3 and R1, whose arguments are in a ```json fence, and of V3.1, which has no fence."""
    yield from _read_sections(reader, parts, DEEPSEEK)


def read_kimi(reader: AnswerReader, parts: AnswerParts, _names: Collection[str]) -> Steps[None]:
    """Read Kimi K2's calls, whose header is the call's id: `functions.NAME:NUMBER`.

    The id is kept, because Kimi's chat template writes the ids of earlier calls into the prompt.
    """
    yield from _read_sections(reader, parts, KIMI)


def _read_sections(reader: AnswerReader, parts: AnswerParts, markers: SectionMarkers) -> Steps[None]:
    while (yield from reader.until((markers.begin,), parts.content)):
        before = [markers.begin, (yield from reader.space())]
        while (yield from reader.literal(markers.call_begin)):
            called = yield from _read_in_section(reader, parts, [*before, markers.call_begin], markers)
            before = [(yield from reader.space())] if called else []
        if (yield from reader.literal(markers.end)):
            before = [*before, markers.end] if markers.begin in before else []
            yield from reader.space()
        parts.content("".join(before))


def _read_in_section(
    reader: AnswerReader, parts: AnswerParts, before: list[str], markers: SectionMarkers
) -> Steps[bool]:
    header: list[str] = []
    marker = yield from reader.until((markers.separator,), header.append)
    before = [*before, *header, marker]
    name, call_id, fence = "".join(header).strip(), "", ""
    if match := _KIMI_ID.fullmatch(name):
        name, call_id = match.group(1), name
    elif name == "function":
        header = []
        marker = yield from reader.until(("```json",), header.append)
        before, name, fence = [*before, *header, marker], "".join(header), "```"
    called = yield from _read_arguments(reader, parts, name, before, marked=bool(marker), call_id=call_id)
    if called:
        yield from read_end(reader, parts, *([fence] if fence else []), markers.call_end)
    return called
