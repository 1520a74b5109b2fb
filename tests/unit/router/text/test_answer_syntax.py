"""Parsers of answers: every cut of a text into pieces gives the same reasoning, content and tool calls."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.answer_syntax.formats import AnswerSyntax, choose_calls, choose_reasoning
from tandem.protocol.errors import InvalidArgument

ONE = '{"name": "f", "arguments": {"a": "x}\\"{", "b": [1, {"c": null}]}}'
TWO = '{"arguments": {"d": "é"}, "name": "g"}'
F, G = ("f", '{"a": "x}\\"{", "b": [1, {"c": null}]}'), ("g", '{"d": "é"}')
LLAMA = ONE.replace("arguments", "parameters")
B, E, C, D, S = (f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
FENCED = f"{C}function{S}f\n```json\n{F[1]}\n```{D}"
HARMONY = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"

TOOLS: dict[str, dict[str, Any]] = {
    "f": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "deep": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "code": {"type": ["string", "null"]},
            "unit": {"enum": ["c", "f"]},
            "sure": {"type": "boolean"},
        }
    },
    "g": {},
}
XML = (
    '<tool_call>\n<function=f>\n<parameter=city>\n São "P"\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
    '<parameter=deep>{"a": [1]}</parameter>\n<parameter=code>\n7\n</parameter>\n<parameter=unit>\nc\n</parameter>\n'
    "<parameter=sure>\nTrue\n</parameter>\n</function>\n</tool_call>"
)
XML_F = '{"city": " São \\"P\\"\\n", "days": 3, "deep": {"a": [1]}, "code": "7", "unit": "c", "sure": true}'
KEY, VALUE = "<arg_key>{}</arg_key>", "<arg_value>{}</arg_value>"
GLM = "<tool_call>f\n" + "".join(
    f"{KEY.format(key)}\n{VALUE.format(value)}\n"
    for key, value in (("city", 'São "P"\n'), ("days", "many"), ("deep", "None"), ("code", "null"), ("other", "[1.5]"))
)
GLM_F = '{"city": "São \\"P\\"\\n", "days": "many", "deep": null, "code": null, "other": [1.5]}'
Expected = tuple[str, str, list[tuple[str, str]]]
CASES: list[tuple[str, str, str, Expected]] = [
    ("hermes", "", f"Sure.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>", ("Sure.\n", "", [F, G])),
    ("hermes", "", f"<tool_call>{ONE}", ("", "", [F])),
    ("hermes", "", '<tool_call>{"name": "f", "arguments": {"a": "cu', ("", "", [("f", '{"a": "cu')])),
    ("hermes", "", '<tool_call>{"name": "f", "argu', ('<tool_call>{"name": "f", "argu', "", [])),
    ("hermes", "", "<tool_call>f(1)</tool_call> x", ("<tool_call>f(1)</tool_call> x", "", [])),
    ("hermes", "", "a < b <tool_c", ("a < b <tool_c", "", [])),
    ("hermes", "", '<tool_call>{"name": 3, "arguments": {}}', ('<tool_call>{"name": 3, "arguments": {}}', "", [])),
    ("hermes", "", '<tool_call>{"name": "f", "arguments": {"a": [1}}', ("}}", "", [("f", '{"a": [1')])),
    ("hermes", "", f"Ok <tool_call>[\n{ONE},\n{TWO}\n]</tool_call>\n", ("Ok ", "", [F, G])),
    ("hermes", "", "<tool_call>[]</tool_call>", ("<tool_call>[]</tool_call>", "", [])),
    ("hermes", "qwen3", f"<think>\nHm <tool_call>\n</think>\n\n<tool_call>{ONE}</tool_call>",
     ("", "\nHm <tool_call>\n", [F])),
    ("hermes", "deepseek_r1", "Hm</think>\n\nYes", ("Yes", "Hm", [])),
    ("", "qwen3", " No <think>", (" No <think>", "", [])),
    ("", "qwen3", "<think>cut </thi", ("", "cut </thi", [])),
    ("llama3_json", "", LLAMA, ("", "", [F])),
    ("llama3_json", "", f"<|python_tag|>{LLAMA}; {TWO}", ("", "", [F, G])),
    ("llama3_json", "", f"Look: <|python_tag|>{LLAMA}", ("Look: ", "", [F])),
    ("llama3_json", "", '{"name": "other", "parameters": {}}', ('{"name": "other", "parameters": {}}', "", [])),
    ("llama3_json", "", '<|python_tag|>f.call(q="x")', ('<|python_tag|>f.call(q="x")', "", [])),
    ("llama3_json", "", "Plain {text}.", ("Plain {text}.", "", [])),
    ("mistral", "", f"[TOOL_CALLS][{ONE}, {TWO}]", ("", "", [F, G])),
    ("mistral", "", f"Ok[TOOL_CALLS]f[ARGS]{F[1]}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{G[1]}", ("Ok", "", [F, G])),
    ("mistral", "", "[TOOL_CALLS]f no", ("[TOOL_CALLS]f no", "", [])),
    ("mistral", "", "[TOOL_CALLS][1, 2]", ("[TOOL_CALLS][1, 2]", "", [])),
    ("deepseek_v3", "", f"{B}{FENCED}\n{C}g{S}{G[1]}{D}{E}", ("", "", [F, G])),
    ("deepseek_v3", "", f"Hi{B}{C}function{S}f\n```json\nno\n```{D}{E}",
     (f"Hi{B}{C}function{S}f\n```json\nno\n```{D}{E}", "", [])),
    ("openai", "openai_gptoss", f"{HARMONY}<|channel|>final<|message|>Yes.", ("Yes.", "Hm.", [])),
    ("openai", "openai_gptoss",
     f"{HARMONY}<|channel|>commentary to=functions.g <|constrain|>json<|message|>{G[1]}<|call|>", ("", "Hm.", [G])),
    ("qwen3_coder", "", f"Ok.\n{XML}\n<tool_call><function=g></function></tool_call>",
     ("Ok.\n", "", [("f", XML_F), ("g", "{}")])),
    ("qwen3_coder", "qwen3", f"<think>Hm</think>\n\n{XML}", ("", "Hm", [("f", XML_F)])),
    ("qwen3_coder", "", "<function=g>\n<parameter=x>\nNaN\n</parameter>\n</function>",
     ("", "", [("g", '{"x": "NaN"}')])),
    ("qwen3_coder", "", "A <function=other> is no call", ("A <function=other> is no call", "", [])),
    ("qwen3_coder", "", "<tool_call>\n<function=>", ("<tool_call>\n<function=>", "", [])),
    ("qwen3_coder", "", '<tool_call>{"name": 1}', ('<tool_call>{"name": 1}', "", [])),
    ("qwen3_coder", "", "<tool_call><function=f><parameter=city>Par", ("", "", [("f", '{"city": "Par')])),
    ("qwen3_coder", "", "<tool_call><function=f><parameter=city>a</parameter>no", ("no", "", [("f", '{"city": "a"')])),
    ("glm45", "qwen3", f"<think></think>\nSo\n{GLM}</tool_call>\n<tool_call>g</tool_call>",
     ("So\n", "", [("f", GLM_F), ("g", "{}")])),
    ("glm45", "", "<tool_call>f<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>x",
     ("x", "", [("f", '{"days": 3}')])),
    ("glm45", "", "<tool_call>f<arg_key>days</arg_key><arg_value>3", ("", "", [("f", '{"days": ')])),
    ("glm45", "", "<tool_call>not a call</tool_call>.", ("<tool_call>not a call</tool_call>.", "", [])),
    ("glm45", "", "<tool_call>f<arg_key>a</arg_key>no", ("no", "", [("f", "")])),
]  # fmt: skip


def parsed(calls: str, reasoning: str, pieces: Iterable[str]) -> Expected:
    parser = AnswerSyntax(calls, reasoning, tools=TOOLS).parser()
    content, thought, collected = "", "", list[list[str]]()
    for delta in [*map(parser.feed, pieces), parser.finish()]:
        content += delta.content
        thought += delta.reasoning
        for call in delta.calls:
            assert bool(call.name) == bool(call.call_id) == (call.index == len(collected))
            collected.extend([[call.name, ""]] if call.name else [])
            collected[call.index][1] += call.arguments
    assert parser.called == bool(collected)
    return content, thought, [(name, arguments) for name, arguments in collected]


@pytest.mark.parametrize(("calls", "reasoning", "text", "expected"), CASES)
def test_whole_texts_and_single_characters(calls: str, reasoning: str, text: str, expected: Expected) -> None:
    assert parsed(calls, reasoning, [text]) == expected
    assert parsed(calls, reasoning, text) == expected


@given(st.sampled_from(CASES), st.lists(st.integers(0, 200)), st.integers(0, 200))
def test_every_cut_gives_the_same(case: tuple[str, str, str, Expected], cuts: list[int], end: int) -> None:
    calls, reasoning, text, _ = case
    text = text[: end or None]
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert parsed(calls, reasoning, pieces) == parsed(calls, reasoning, [text])


@given(st.sampled_from(CASES), st.integers(0, 200), st.integers(0, 200), st.text('{}"<>[],:ab'))
def test_broken_texts_never_fail(case: tuple[str, str, str, Expected], at: int, to: int, noise: str) -> None:
    calls, reasoning, text, _ = case
    text = text[:at] + noise + text[to:]
    assert parsed(calls, reasoning, text) == parsed(calls, reasoning, [text])


def test_arguments_come_while_they_are_generated() -> None:
    parser = AnswerSyntax("hermes").parser()
    parser.feed('<tool_call>{"name": "f", "arguments": {')
    assert parser.feed('"city": "Par').calls[0].arguments == '"city": "Par'


@pytest.mark.parametrize(
    ("name", "begun"),
    [("qwen3_coder", "<function=f>\n<parameter=city>\nPar"), ("glm45", "f<arg_key>city</arg_key><arg_value>Par")],
)
def test_strings_between_tags_come_while_they_are_generated(name: str, begun: str) -> None:
    parser = AnswerSyntax(name, tools=TOOLS).parser()
    (call,) = parser.feed(f"<tool_call>{begun}").calls
    assert (call.name, call.arguments) == ("f", '{"city": "Par')
    assert parser.feed('is"').calls[0].arguments == 'is\\"'


def test_one_call_without_parallel() -> None:
    parser = AnswerSyntax("hermes", parallel=False).parser()
    (call,) = parser.feed(f"<tool_call>{ONE}</tool_call><tool_call>{TWO}</tool_call>").calls
    assert (call.name, json.loads(call.arguments)["b"]) == ("f", [1, {"c": None}])


def test_the_template_chooses() -> None:
    assert choose_calls("auto", "<tool_call>") == "hermes"
    assert choose_calls("auto", "x") == choose_calls("none", "<tool_call>") == ""
    assert choose_calls("auto", "<tool_call>\n<function=f>\n<parameter=a>") == "qwen3_coder"
    assert choose_calls("auto", "<tool_call>{name}\n<arg_key>") == "glm45"
    assert (choose_calls("mistral", ""), choose_calls("auto", "<|python_tag|>")) == ("mistral", "llama3_json")
    assert (choose_reasoning("auto", "</think>"), choose_reasoning("none", "</think>")) == ("qwen3", "")
    with pytest.raises(InvalidArgument, match="tool_call_parser"):
        choose_calls("hermess", "")
