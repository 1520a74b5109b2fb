"""Grammars are made in a process of its own: whatever takes too long ends with it, and the next one gets another."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.tokenizers.grammar_process import GrammarKind, GrammarProcess, GrammarTokens
from tandem.tokenizers.grammars import GRAMMAR_CHARS_MAX, of_choices, of_ebnf, of_json_schema, of_regex, of_tool_calls
from tests.small_tokenizer import EOS, save_tokenizer

EXPONENTIAL = {"allOf": [{"type": "string", "pattern": f".*a.{{{number}}}b"} for number in range(20)]}


VOCAB = 600


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarProcess]:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    made = GrammarProcess(GrammarTokens(folder, VOCAB, (EOS,)))
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
def test_errors_name_the_cause(process: GrammarProcess, kind: GrammarKind, value: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        process.make(kind, value)


def test_a_grammar_of_exponential_time_ends_with_its_process(process: GrammarProcess) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="takes more than"):
            process.make(GrammarKind.JSON_SCHEMA, EXPONENTIAL)
        assert process.make(GrammarKind.REGEX, "a") == of_regex("a")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (GrammarKind.REGEX, "a?" * 120_000),
        (GrammarKind.REGEX, "(a{1000}){1000}"),
        (GrammarKind.JSON_SCHEMA, {"type": "string", "pattern": "^(a{1000}){1000}$"}),
        (GrammarKind.EBNF, "start: /(a{1000}){1000}/"),
        (GrammarKind.TOOL_CALL, {"f": {"properties": {"x": EXPONENTIAL}}}),
    ],
)
def test_every_kind_is_compiled_there_within_limits(process: GrammarProcess, kind: GrammarKind, value: Any) -> None:
    """Making any of these takes milliseconds; compiling it, or its first mask, takes seconds or gigabytes."""
    with pytest.raises(ValueError, match=r"simplify it|cannot be followed"):
        process.make(kind, value)
    assert process.make(GrammarKind.REGEX, "a") == of_regex("a")


def test_the_memory_of_a_grammar_is_limited(process: GrammarProcess) -> None:
    assert process.make(GrammarKind.REGEX, "a")
    assert process._process is not None
    pid = process._process.pid
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    most, _ = resource.prlimit(pid, resource.RLIMIT_AS)
    assert 0 < most <= pages * resource.getpagesize() + (512 << 20)


def test_a_compilation_without_requesters_ends(process: GrammarProcess) -> None:
    """However much time it has left."""
    patient, unwanted = GrammarProcess(process._tokens, deadline_s=600.0), threading.Event()
    assert patient.make(GrammarKind.REGEX, "a") == of_regex("a")
    compiling = patient._process
    assert compiling is not None
    threading.Timer(0.1, unwanted.set).start()
    with pytest.raises(ValueError, match="client has left"):
        patient.make(GrammarKind.JSON_SCHEMA, EXPONENTIAL, unwanted)
    assert compiling.poll() is not None
    patient.close()


def test_a_model_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs the model's tokenizer: .*no tokenizer"):
        GrammarProcess(GrammarTokens(tmp_path, VOCAB, (EOS,))).make(GrammarKind.REGEX, "a")


def test_a_process_that_died_is_replaced(process: GrammarProcess) -> None:
    assert process.make(GrammarKind.REGEX, "a")
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert process.make(GrammarKind.REGEX, "b") == of_regex("b")
    process.close()
    assert process._process is None
    assert process.make(GrammarKind.REGEX, "c") == of_regex("c")
