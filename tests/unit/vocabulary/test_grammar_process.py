"""Grammars are made in a process of its own: whatever takes too long ends with it, and the next one gets another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from vocabulary.grammar_process import GrammarKind, GrammarProcess
from vocabulary.grammars import GRAMMAR_CHARS_MAX, of_choices, of_ebnf, of_json_schema, of_regex, of_tool_calls

EXPONENTIAL = {"allOf": [{"type": "string", "pattern": f".*a.{{{number}}}b"} for number in range(20)]}


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    made = GrammarProcess()
    yield made
    made.close()


def test_each_kind_is_made(process: GrammarProcess) -> None:
    schema, tools = {"type": "object"}, {"f": {"properties": {}}}
    assert process.make(GrammarKind.JSON_SCHEMA, schema) == of_json_schema(schema)
    assert process.make(GrammarKind.REGEX, "a+") == of_regex("a+")
    assert process.make(GrammarKind.CHOICE, ["a", "b"]) == of_choices(["a", "b"])
    assert process.make(GrammarKind.EBNF, 'root ::= "a"') == of_ebnf('root ::= "a"')
    assert process.make(GrammarKind.TOOL_CALL, tools) == of_tool_calls(tools)


@pytest.mark.parametrize(
    ("kind", "value", "named"),
    [
        (GrammarKind.REGEX, "((", "cannot be followed"),
        (GrammarKind.JSON_SCHEMA, {"uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        (GrammarKind.EBNF, "x", "EBNF"),
        (GrammarKind.REGEX, "a" * 2 * GRAMMAR_CHARS_MAX, "the limit is"),
    ],
)
def test_errors_are_told(process: GrammarProcess, kind: GrammarKind, value: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        process.make(kind, value)


def test_a_grammar_of_exponential_time_ends_with_its_process(process: GrammarProcess) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="takes more than"):
            process.make(GrammarKind.JSON_SCHEMA, EXPONENTIAL)
        assert process.make(GrammarKind.REGEX, "a") == of_regex("a")


def test_a_process_that_died_is_replaced(process: GrammarProcess) -> None:
    assert process.make(GrammarKind.REGEX, "a")
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert process.make(GrammarKind.REGEX, "b") == of_regex("b")
    process.close()
    assert process._process is None
    assert process.make(GrammarKind.REGEX, "c") == of_regex("c")
