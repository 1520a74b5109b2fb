"""Grammars over a model's tokens: what they allow, and hostile ones that fail alone, in time."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from jsonschema import Draft202012Validator
from llguidance import LLParserLimits

from tandem.protocol.errors import InvalidArgument, ModelError
from tandem.tokenizers.grammars import (
    GRAMMAR_CHARS_MAX,
    AnswerGrammar,
    Grammars,
    LazyGrammars,
    of_choices,
    of_ebnf,
    of_json_schema,
    of_regex,
    of_tool_calls,
)
from tests.small_tokenizer import EOS, TOKENS, save_tokenizer
from tests.soak import seeds

VOCAB = 600
"""More logits than tokens, as models have."""
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "array",
        "items": {"anyOf": [{"type": "boolean"}, {"enum": ["a", "bc"]}, {"type": "null"}]},
        "minItems": 2,
        "maxItems": 4,
    },
    "recursive": {
        "$defs": {"t": {"type": "object", "properties": {"c": {"$ref": "#/$defs/t"}}, "additionalProperties": False}},
        "$ref": "#/$defs/t",
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Grammars:
    return Grammars(folder, VOCAB, [EOS])


def allowed(bits: np.ndarray[Any, Any]) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


def walk(grammars: Grammars, grammar: str, seed: int, most: int = 400) -> list[int]:
    """Draws each token evenly from the allowed ones, with a preference for ends; returns the answer with its end."""
    state, draw, answer = grammars.begin(grammar), random.Random(seed), list[int]()
    while len(answer) < most:
        choice = allowed(state.allowed(answer))
        answer.append(EOS if EOS in choice and draw.random() < 0.3 else draw.choice(choice))
        if answer[-1] == EOS:
            return answer
    return answer


def text_of(folder: Path, answer: Sequence[int]) -> str:
    inner: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return str(inner.decode(answer[:-1] if answer[-1] == EOS else answer))


@pytest.mark.parametrize("name", SCHEMAS)
@seeds(4)
def test_json_validates(grammars: Grammars, folder: Path, name: str, seed: int) -> None:
    answer = walk(grammars, of_json_schema(SCHEMAS[name]), seed)
    if answer[-1] == EOS:
        Draft202012Validator(SCHEMAS[name]).validate(json.loads(text_of(folder, answer)))
    else:
        assert name == "recursive"


@seeds(4)
def test_texts_match(grammars: Grammars, folder: Path, seed: int) -> None:
    pattern = r"[a-c]{2,5}-(x|yy)\.[0-9]{3}"
    assert re.fullmatch(pattern, text_of(folder, walk(grammars, of_regex(pattern), seed)))
    choices = ['say "yes"', "no\n", "café"]
    assert text_of(folder, walk(grammars, of_choices(choices), seed)) in choices
    ebnf = walk(grammars, of_ebnf('root ::= item ("," item)*\nitem ::= [a-z] | "(" item ")"'), seed, 30)
    assert re.match(r"\(*[a-z]", text_of(folder, ebnf))


TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "$defs": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    'say "it"': {"properties": {}, "additionalProperties": False},
}


@seeds(6)
def test_a_tool_call_has_the_parameters_of_its_function(grammars: Grammars, folder: Path, seed: int) -> None:
    call = json.loads(text_of(folder, walk(grammars, of_tool_calls(TOOLS), seed)))
    assert set(call) == {"name", "parameters"}
    Draft202012Validator(TOOLS[call["name"]]).validate(call["parameters"])
    with pytest.raises(ValueError, match="levels"):
        of_tool_calls({"f": nested(100)})


def test_no_token_without_text_is_allowed(grammars: Grammars) -> None:
    """Special tokens are no text, and ids beyond the tokenizer's have none; an answer ends where it may."""
    first = allowed(grammars.begin(of_json_schema({"type": "string"})).allowed(()))
    assert first
    assert all(2 < token < TOKENS for token in first)
    assert allowed(grammars.begin(of_regex("a*")).allowed(()))[0] == EOS


def test_the_state_follows_from_the_answer(grammars: Grammars) -> None:
    """Another worker goes on from any place, as after a hand-over."""
    grammar = of_json_schema(SCHEMAS["flat"])
    answer, state = walk(grammars, grammar, 1), grammars.begin(grammar)
    for length in range(len(answer)):
        assert state.allowed(answer[:length]).tolist() == grammars.begin(grammar).allowed(answer[:length]).tolist()


def test_drafts_are_followed_as_far_as_they_are_allowed(grammars: Grammars) -> None:
    grammar = of_json_schema(SCHEMAS["flat"])
    answer, state = walk(grammars, grammar, seed=2), grammars.begin(grammar)
    masks = [grammars.begin(grammar).allowed(answer[:count]) for count in range(len(answer))]
    for at in range(0, len(answer) - 5, 3):
        drafts = answer[at : at + 4]
        for count in range(5):
            wrong = next(token for token in range(3, TOKENS) if token not in allowed(masks[at + count]))
            assert state.count_allowed(answer[:at], [*drafts[:count], wrong, *drafts]) == count
        for count in range(1, 5):
            assert np.array_equal(state.allowed(answer[:at], count), masks[at + count])
        assert np.array_equal(state.allowed(answer[:at]), masks[at])


def fails_at(state: AnswerGrammar, answer: Sequence[int], drafts: Callable[[], list[int]] | None = None) -> int:
    """Returns the number of tokens behind which the grammar exceeds its limits, with drafts before each of them."""
    for at in range(len(answer)):
        try:
            if drafts is not None:
                state.count_allowed(answer[:at], drafts())
            state.allowed(answer[:at])
        except InvalidArgument:
            return at
    return len(answer)


def test_neither_drafts_nor_other_answers_bring_a_limit_nearer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a compiled grammar share the lexer, and its limit."""
    monkeypatch.setattr("tandem.tokenizers.grammars.limits", lambda: LLParserLimits(max_lexer_states=100))
    grammars, grammar, dice = Grammars(folder, VOCAB, [EOS]), of_regex("(a|b)*a(a|b){12}"), random.Random(0)
    letters = [token for token in allowed(grammars.begin(grammar).allowed(())) if token != EOS]

    def tokens(count: int = 5) -> list[int]:
        return [dice.choice(letters) for _ in range(count)]

    answer, early = tokens(300), grammars.begin(grammar)
    assert 30 < fails_at(grammars.begin(grammar), tokens(300), tokens) < 300
    fails = fails_at(early, answer, tokens)
    assert 30 < fails < 300, "others have left nothing of the lexer, so it has one of its own"
    assert fails <= fails_at(grammars.begin(grammar), answer, tokens) < 300
    assert fails <= fails_at(grammars.begin(grammar), answer) < 300


def test_an_answer_that_does_not_follow_is_an_error(grammars: Grammars) -> None:
    state = grammars.begin(of_regex("[0-9]+"))
    wrong = next(token for token in range(3, TOKENS) if token not in allowed(state.allowed(())))
    with pytest.raises(InvalidArgument, match="grammar"):
        state.allowed([wrong])


HOSTILE: dict[str, Callable[[], str]] = {
    "nested repetitions": lambda: of_regex("(((a{1,1000}){1,1000}){1,1000}){1,100}"),
    "alternatives": lambda: of_regex("(a|aa|aaa|[a-z]{0,500}){1,5000}x"),
    "groups": lambda: of_regex("(" * 50_000 + "a" + ")" * 50_000),
    "classes": lambda: of_regex(r"[\p{L}]{1,200}[^a]{1,2000}" * 50),
    "a deep schema": lambda: of_json_schema(json.loads('{"items":' * 60 + "{}" + "}" * 60)),
    "a very deep schema": lambda: of_json_schema(nested(5000)),
    "a reference to itself": lambda: of_json_schema({"$ref": "#"}),
    "a reference elsewhere": lambda: of_json_schema({"$ref": "http://localhost:1/x"}),
    "many values": lambda: of_json_schema({"enum": [f"v{number * 7919}" for number in range(10_000)]}),
    "many patterns": lambda: of_json_schema(
        {"anyOf": [{"type": "string", "pattern": f"^[a-z]{{{number},300}}b$"} for number in range(200)]}
    ),
    "long strings": lambda: of_json_schema({"type": "string", "minLength": 100_000, "maxLength": 200_000}),
    "deep brackets": lambda: of_ebnf("root ::= " + "(" * 8000 + '"a"' + ")" * 8000),
    "many rules": lambda: of_ebnf(
        "root ::= r0\n" + "\n".join(f'r{n} ::= "a" r{n + 1} | "b" r{n + 1}' for n in range(450)) + '\nr450 ::= "c"'
    ),
    "a long text": lambda: of_ebnf("root ::= " + '"a" ' * 10_000),
    "ambiguity": lambda: of_ebnf('root ::= root root | "a" | ""'),
    "blank lines": lambda: of_ebnf('root ::= "a"' + "\n" * 16_000),
    "no rule": lambda: of_ebnf("root ::= missing"),
    "nothing at all": lambda: of_json_schema(False),
    "a huge grammar": lambda: of_regex("a" * (GRAMMAR_CHARS_MAX + 1)),
}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_fails_alone_or_is_followed(grammars: Grammars, name: str) -> None:
    reason = "it is followed"
    try:
        walk(grammars, HOSTILE[name](), 0, most=30)
    except (InvalidArgument, ValueError) as error:
        reason = str(error)
    assert 0 < len(reason) < 500
    grammars.check(of_regex("a"))


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": 3}, "type must be"),
    ],
)
def test_what_is_not_supported_is_named(grammars: Grammars, schema: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        grammars.check(of_json_schema(schema))


def test_the_cache_is_bounded(folder: Path) -> None:
    grammars = Grammars(folder, VOCAB, [EOS])
    for number in range(12):
        grammars.check(of_choices([f"{number} {index:09}" for index in range(8_000)]))
    assert 2 <= len(grammars._compiled) <= 10
    for number in range(100):
        grammars.check(of_regex(f"b{{{number}}}"))
    assert len(grammars._compiled) == 64
    assert of_regex("b{99}") in grammars._compiled


def test_a_grammar_that_took_too_long_fails_each_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states that its lexer has by now would give the second answer a mask in less time."""
    monkeypatch.setattr("tandem.tokenizers.grammars._TOKEN_S", 0.01)
    grammars = Grammars(folder, VOCAB, [EOS])
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="processor time"):
            grammars.check(of_regex("a{200000}"))


def test_thousands_of_choices_are_followed(grammars: Grammars, folder: Path) -> None:
    choices = [f"number {index * 7919} of them" for index in range(9_000)]
    for seed in range(3):
        assert text_of(folder, walk(grammars, of_choices(choices), seed)) in choices
    assert {text_of(folder, walk(grammars, of_choices(["a", "ab"]), seed)) for seed in range(9)} == {"a", "ab"}


@pytest.mark.parametrize(
    "text", ["root ::= root root root | [a-z] | [a-z ]+", 'root ::= x+\nx ::= x x x | [a-z ]+ | x? "a"']
)
def test_an_ambiguous_grammar_fails_before_its_masks_take_long(grammars: Grammars, text: str) -> None:
    """Over 49,152 tokens the masks of such ones took more than a second."""
    state, dice, answer = grammars.begin(of_ebnf(text)), random.Random(0), list[int]()

    def go_on() -> None:
        while len(answer) < 60:
            answer.append(dice.choice([token for token in allowed(state.allowed(answer)) if token != EOS]))

    with pytest.raises(InvalidArgument, match=r"too complex at this point \(.*\); simplify it"):
        go_on()


def test_the_tokenizer_is_loaded_once_and_its_error_comes_with_the_first_grammar(folder: Path, tmp_path: Path) -> None:
    made = []

    def make() -> Grammars:
        made.append(Grammars(folder, VOCAB, [EOS]))
        return made[-1]

    lazy = LazyGrammars(make)
    assert not made
    lazy.load()
    assert lazy.get() is lazy.get() is made[0]
    without = LazyGrammars(lambda: Grammars(tmp_path, VOCAB, [EOS]))
    without.load()
    with pytest.raises(ModelError, match="no tokenizer"):
        without.get()


def test_a_model_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        Grammars(tmp_path, VOCAB, [EOS])
