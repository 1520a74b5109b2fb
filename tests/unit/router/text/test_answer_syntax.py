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
KIMI_BEGIN, KIMI_CALL, KIMI_JSON, KIMI_CALL_END, KIMI_END = (
    f"<|tool_{name}|>"
    for name in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end")
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="f">\n<parameter name="city"> São "P"\n</parameter>\n'
    '<parameter name="days">3</parameter>\n<parameter name="deep">{"a": [1]}</parameter>\n</invoke>\n'
    '<invoke name="g"></invoke>\n</minimax:tool_call>'
)
MINIMAX_F = '{"city": " São \\"P\\"\\n", "days": 3, "deep": {"a": [1]}}'
DSML = "｜DSML｜"
DSML_BEGIN, DSML_END = f"<{DSML}function_calls>\n", f"</{DSML}function_calls>"
DSML_CALL, DSML_CALL_END = f'<{DSML}invoke name="{{}}">\n', f"</{DSML}invoke>\n"
DSML_VALUE = f'<{DSML}parameter name="{{}}" string="{{}}">{{}}</{DSML}parameter>\n'
QUOTE = '<|"|>'
GEMMA = (
    f'<|tool_call>call:f{{city:{QUOTE}São }}<"\n{QUOTE},deep:{{a:[1.5,{{}},None],b:{{c:{QUOTE}{QUOTE}}}}},sure:true}}'
)
GEMMA_F = '{"city": "São }<\\"\\n", "deep": {"a": [1.5, {}, null], "b": {"c": ""}}, "sure": true}'
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
    ("kimi_k2", "qwen3",
     f"<think>Hm</think>Ok {KIMI_BEGIN}{KIMI_CALL}functions.f:0{KIMI_JSON}{F[1]}{KIMI_CALL_END}\n"
     f"{KIMI_CALL}g{KIMI_JSON} {G[1]}{KIMI_CALL_END}{KIMI_END}\nyes", ("Ok yes", "Hm", [F, G])),
    ("kimi_k2", "", f'{KIMI_BEGIN}{KIMI_CALL}functions.f:12{KIMI_JSON}{{"a": "cu', ("", "", [("f", '{"a": "cu')])),
    ("kimi_k2", "", f"{KIMI_BEGIN}{KIMI_CALL}no call:0{KIMI_JSON}{{}}{KIMI_END}",
     (f"{KIMI_BEGIN}{KIMI_CALL}no call:0{KIMI_JSON}{{}}{KIMI_END}", "", [])),
    ("kimi_k2", "", f"{KIMI_CALL}f:0{KIMI_JSON}{{}}", (f"{KIMI_CALL}f:0{KIMI_JSON}{{}}", "", [])),
    ("minimax_m2", "qwen3", f"<think>Hm\n</think>\n\nOk\n{MINIMAX}\n yes",
     ("Ok\nyes", "Hm\n", [("f", MINIMAX_F), ("g", "{}")])),
    ("minimax_m2", "", f"{MINIMAX}{MINIMAX}", ("", "", [("f", MINIMAX_F), ("g", "{}")] * 2)),
    ("minimax_m2", "", '<minimax:tool_call><invoke name="f"><parameter name="city">Par',
     ("", "", [("f", '{"city": "Par')])),
    ("minimax_m2", "", '<minimax:tool_call> none </minimax:tool_call> <invoke name="other">',
     ('<minimax:tool_call> none </minimax:tool_call> <invoke name="other">', "", [])),
    ("deepseek_v32", "qwen3",
     "<think>Hm</think>Ok\n\n" + DSML_BEGIN + DSML_CALL.format("f") + DSML_VALUE.format("city", "true", ' "1" ')
     + DSML_VALUE.format("other", "false", '{"a": [1]}') + DSML_VALUE.format("code", "false", "7")
     + DSML_VALUE.format("days", "false", "no JSON") + DSML_CALL_END + DSML_CALL.format("g") + DSML_CALL_END + DSML_END,
     ("Ok\n\n", "Hm",
      [("f", '{"city": " \\"1\\" ", "other": {"a": [1]}, "code": 7, "days": "no JSON"}'), ("g", "{}")])),
    ("deepseek_v32", "", f"{DSML_BEGIN}{DSML_CALL.format('f')}<{DSML}parameter name=\"city\" string=\"true\">Pa",
     ("", "", [("f", '{"city": "Pa')])),
    ("deepseek_v32", "", f"<{DSML}function_calls> and <{DSML}", (f"<{DSML}function_calls> and <{DSML}", "", [])),
    ("gemma4", "gemma4",
     f"<|channel>thought\nHm\n<channel|>Ok {GEMMA}<tool_call|><|tool_call>call:g{{}}<tool_call|> yes",
     ("Ok yes", "Hm\n", [("f", GEMMA_F), ("g", "{}")])),
    ("gemma4", "gemma4", "<|channel>thoughtful", ("<|channel>thoughtful", "", [])),
    ("gemma4", "", f"<|tool_call>call:f{{{QUOTE}a{QUOTE} : 1, b:[2,],c:x y,}}",
     ("", "", [("f", '{"a": 1, "b": [2], "c": "x y"}')])),
    ("gemma4", "", "<|tool_call>call:g{}, <tool_call|>", (", <tool_call|>", "", [("g", "{}")])),
    ("gemma4", "", "<|tool_call>call:f{a:4", ("", "", [("f", '{"a": ')])),
    ("gemma4", "", f"<|tool_call>call:f{{a:{QUOTE}cu", ("", "", [("f", '{"a": "cu')])),
    ("gemma4", "", "<|tool_call>call:f{a:[1}<tool_call|>", ("}<tool_call|>", "", [("f", '{"a": [1, ')])),
    ("gemma4", "", "<|tool_call>f{} <|tool_call>call:not a call{}",
     ("<|tool_call>f{} <|tool_call>call:not a call{}", "", [])),
    ("mistral", "mistral", f"[THINK]Hm [TOOL_CALLS][/THINK]Ok[TOOL_CALLS]f[ARGS]{F[1]}[TOOL_CALLS]g[ARGS]{G[1]}",
     ("Ok", "Hm [TOOL_CALLS]", [F, G])),
    ("mistral", "mistral", "No [THINK]", ("No [THINK]", "", [])),
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
    [
        ("qwen3_coder", "<tool_call><function=f>\n<parameter=city>\nPar"),
        ("glm45", "<tool_call>f<arg_key>city</arg_key><arg_value>Par"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="city">Par'),
        ("deepseek_v32", f'{DSML_BEGIN}{DSML_CALL.format("f")}<{DSML}parameter name="city" string="true">Par'),
        ("gemma4", f"<|tool_call>call:f{{city:{QUOTE}Par"),
    ],
)
def test_strings_between_tags_come_while_they_are_generated(name: str, begun: str) -> None:
    parser = AnswerSyntax(name, tools=TOOLS).parser()
    (call,) = parser.feed(begun).calls
    assert (call.name, call.arguments) == ("f", '{"city": "Par')
    assert parser.feed('is"').calls[0].arguments == 'is\\"'


def test_gemma_may_nest_values_without_limit() -> None:
    text = f"<|tool_call>call:f{{a:{'[' * 5_000}{']' * 5_000}}}<tool_call|>"
    assert parsed("gemma4", "", [text]) == ("", "", [("f", f'{{"a": {"[" * 5_000}{"]" * 5_000}}}')])


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
