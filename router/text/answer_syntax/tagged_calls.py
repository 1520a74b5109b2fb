"""The syntaxes in which models write each argument of a tool call between tags; the arguments are converted to JSON.

Strings have no quotes. Where the tags do not show a value's type, it is taken from the function's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from router.text.answer_syntax.json_call import read_end
from router.text.answer_syntax.parser import AnswerParts
from router.text.answer_syntax.reader import AnswerReader, Steps

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the functions' parameters, by function name."""
_NAME = re.compile(r"[\w.-]+")
_CALL, _CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class XmlTags:
    """The tags of a block of calls in which each call and each argument has an element of its own, as in XML.

    `call` and `parameter` are the opening tags up to the name of the function or the parameter. Qwen3-Coder writes
    `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.
    """

    block: str
    block_end: str
    call: str
    call_end: str
    parameter: str
    parameter_end: str
    own_lines: bool = False
    """True if a line break after the opening tag of a value and one before its closing tag are not part of it."""


QWEN_CODER = XmlTags(_CALL, _CALL_END, "<function=", "</function>", "<parameter=", "</parameter>", own_lines=True)
MINIMAX = XmlTags(
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', "</invoke>", '<parameter name="', "</parameter>"
)
DSML = "｜DSML｜"
DEEPSEEK_DSML = XmlTags(
    f"<{DSML}function_calls>",
    f"</{DSML}function_calls>",
    f'<{DSML}invoke name="',
    f"</{DSML}invoke>",
    f'<{DSML}parameter name="',
    f"</{DSML}parameter>",
)
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
GLM_TAGS = (_CALL, _CALL_END, _KEY, _KEY_END, _VALUE, _VALUE_END)
_STRING = frozenset({"string"})
_DECLARED = {'string="true"': _STRING, 'string="false"': frozenset[str]()}
"""For each attribute by which DeepSeek declares a value's type, the JSON types; empty = the text is JSON."""
_WORDS = {"boolean": {"True": "true", "False": "false"}, "null": {"None": "null"}}
"""For each JSON type, Python's spellings of its values, which models also write, mapped to JSON's spellings."""
_TYPES: Mapping[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
"""The JSON schema types of each Python type."""


def read_xml(reader: AnswerReader, parts: AnswerParts, schemas: Schemas, *, tags: XmlTags) -> Steps[None]:
    """Read the calls of Qwen3-Coder, Qwen3.5, Nemotron 3, MiniMax-M2 and DeepSeek V3.2, which differ in their tags.

    A call without the tag of a block before it counts as a call only if the client offers the function.
    """
    while marker := (yield from reader.until((tags.block, tags.call), parts.content)):
        before, in_block = [marker], marker == tags.block
        if in_block:
            before.append((yield from reader.space()))
            before.append((yield from reader.literal(tags.call)))
        if not before[-1]:
            parts.content("".join(before))
        while before[-1]:
            name: list[str] = []
            end = yield from reader.until((">", "<", "\n"), name.append)
            called = "".join(name).removesuffix('"').strip()
            if end != ">" or not _NAME.fullmatch(called) or not (in_block or called in schemas):
                parts.content("".join([*before, *name, end]))
                break
            parts.begin_call(called)
            if not (yield from _read_parameters(reader, parts, schemas.get(called, {}), tags)):
                break
            yield from reader.space()
            before = [(yield from reader.literal(tags.call))]
            if in_block and not before[0]:
                yield from read_end(reader, parts, tags.block_end)
                yield from reader.space()


def _read_parameters(reader: AnswerReader, parts: AnswerParts, schema: Mapping[str, Any], tags: XmlTags) -> Steps[bool]:
    """Read the parameters of a call up to the end of the function.

    Returns False if invalid text or the answer's end comes first.
    """
    line_break = "\n" if tags.own_lines else ""
    ends = f"{line_break}{tags.parameter_end}", tags.parameter_end
    opening = "{"
    while True:
        yield from reader.space()
        tag = yield from reader.literal(tags.parameter, tags.call_end)
        if tag != tags.parameter:
            if tag:
                parts.arguments("{}" if opening == "{" else "}")
            return bool(tag)
        key: list[str] = []
        if not (yield from reader.until((">",), key.append)):
            return False
        yield from reader.literal(line_break)
        named, _, declared = "".join(key).partition('"')
        types = _DECLARED.get(declared.strip())
        parts.arguments(f"{opening}{quoted(named)}: ")
        if not (yield from _read_value(reader, parts, _types_of(schema, named) if types is None else types, ends)):
            return False
        opening = ", "


def read_glm45(reader: AnswerReader, parts: AnswerParts, schemas: Schemas) -> Steps[None]:
    """Read the calls of GLM-4.5 to 4.7.

    They write `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.
    """
    while (yield from reader.until((_CALL,), parts.content)):
        name: list[str] = []
        tag = yield from reader.until((_KEY, _CALL_END), name.append)
        called = "".join(name).strip()
        if not tag or not _NAME.fullmatch(called):
            parts.content("".join([_CALL, *name, tag]))
            continue
        parts.begin_call(called)
        if (yield from _read_pairs(reader, parts, schemas.get(called, {}), tag)):
            yield from reader.space()


def _read_pairs(reader: AnswerReader, parts: AnswerParts, schema: Mapping[str, Any], tag: str) -> Steps[bool]:
    """Read key and value pairs up to the end of a call; the first `tag` has been read before.

    Returns False if invalid text or the answer's end comes first.
    """
    opening = "{"
    while tag == _KEY:
        key: list[str] = []
        if not (yield from reader.until((_KEY_END,), key.append)):
            return False
        yield from reader.space()
        if not (yield from reader.literal(_VALUE)):
            return False
        named = "".join(key).strip()
        parts.arguments(f"{opening}{quoted(named)}: ")
        if not (yield from _read_value(reader, parts, _types_of(schema, named), (_VALUE_END,))):
            return False
        opening = ", "
        yield from reader.space()
        tag = yield from reader.literal(_KEY, _CALL_END)
    if tag:
        parts.arguments("{}" if opening == "{" else "}")
    return bool(tag)


def _read_value(reader: AnswerReader, parts: AnswerParts, types: frozenset[str], ends: tuple[str, ...]) -> Steps[bool]:
    """Read a value up to one of `ends`, and add it to the arguments as JSON of one of `types`.

    Returns False if the answer ends first.
    """
    if types == _STRING:
        return (yield from read_string(reader, parts, ends))
    text: list[str] = []
    marker = yield from reader.until(ends, text.append)
    parts.arguments(as_json("".join(text), types) if marker else "")
    return bool(marker)


def read_string(reader: AnswerReader, parts: AnswerParts, ends: tuple[str, ...]) -> Steps[bool]:
    """Read a text up to one of `ends`, and add it to the arguments as a JSON string while it is generated.

    Returns False if the answer ends first.
    """
    parts.arguments('"')
    marker = yield from reader.until(ends, lambda text: parts.arguments(quoted(text)[1:-1]))
    parts.arguments('"' if marker else "")
    return bool(marker)


def _types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types of the parameter `key`; empty if the function's schema does not define them."""
    properties = schema.get("properties")
    return frozenset(_types(properties.get(key) if isinstance(properties, Mapping) else None))


def _types(schema: Any, *, nested: bool = True) -> Iterator[str]:
    """Yield the JSON types that the schema of one parameter allows; nothing if the schema does not define them."""
    if not isinstance(schema, Mapping):
        return
    named = schema.get("type")
    if isinstance(named, str):
        yield named
    elif isinstance(named, list):
        yield from (name for name in named if isinstance(name, str))
    elif isinstance(schema.get("enum"), list):
        yield from (name for value in schema["enum"] for name in _TYPES[type(value)])
    if nested:
        for alternative in (*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))):
            yield from _types(alternative, nested=False)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_json(text: str, types: frozenset[str]) -> str:
    """Return a value between tags as JSON, of one of `types` if possible.

    Python's `True`, `False` and `None` become JSON if `types` has their type. Text that is JSON stays unchanged if its
    type is in `types` and is not string, or if `types` lacks string. Any other text becomes a JSON string.
    """
    value = text.strip()
    for kind, words in _WORDS.items():
        if kind in types and value in words:
            return words[value]
    try:
        parsed = json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return quoted(text)
    fits_type = not types.isdisjoint(_TYPES[type(parsed)]) and not isinstance(parsed, str)
    return value if fits_type or "string" not in types else quoted(text)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def quoted(text: str) -> str:
    """Return `text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)
