"""Grammars for structured output: which tokens may come next in an answer.

A grammar is a text in llguidance's format, made from a JSON schema, a regular expression, a list of choices, or a
grammar in EBNF. Routers check it before they admit a request; engines apply it to the logits
(docs/decisions/sampling.md).

Grammars come from clients and may be hostile: the limits below bound the time and memory of each. If a grammar exceeds
the limits while an answer is generated, only that answer fails.
"""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from tandem.protocol.errors import InvalidArgument, ModelError
from tandem.tokenizers.tokenizer_formats import load_tokenizer

GRAMMAR_CHARS_MAX = 1 << 18
"""Maximum number of characters of a grammar's text."""
_EBNF_CHARS_MAX = 1 << 14
"""Maximum number of characters of a grammar in EBNF.

The time to convert a grammar grows with the square of its length; it is 0.4 s for this number.
"""
_DEPTH_MAX = 64
"""Maximum depth of nested objects and lists in a JSON schema."""
_CACHED_CHARS = 1 << 20
"""Maximum total number of characters of the cached compiled grammars; the newest grammar is always cached."""
_CACHED_GRAMMARS = 64
"""Maximum number of cached compiled grammars: the lexer of even a short grammar may take tens of megabytes."""
_ITEMS_MAX = 5_000
"""Maximum number of parser items while one mask is computed.

Masks within this limit took at most 25 ms; within llguidance's limit of 50,000 they took over a second. The grammars
that llama.cpp ships and 200 generated schemas need no more items (docs/decisions/sampling.md).
"""
_TOKEN_S = 0.2
"""Maximum processor time in seconds for one mask: twenty times the longest time of the grammars measured above."""
_REPLAYED_TOKEN_S = 0.001
"""Additional processor time in seconds for each replayed token of a continued answer: ten times the usual time."""
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Whitespace between the parts of JSON; its length is limited, because small models may generate it endlessly."""


def of_json_schema(schema: Mapping[str, Any] | bool) -> str:
    """Return the grammar of the JSON values that are valid under `schema`.

    Raises ValueError if the schema is nested too deeply, or if it is false, which no value satisfies.
    """
    if isinstance(schema, bool):
        if not schema:
            raise ValueError("is false, which no value validates against")
        schema = {}
    if _depth(schema) > _DEPTH_MAX:
        raise ValueError(f"has more than {_DEPTH_MAX} levels of objects and lists")
    schema = {name: value for name, value in schema.items() if name != "x-guidance"}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": _WHITESPACE})


def of_tool_calls(tools: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the grammar of one tool call in Llama 3's format: `{"name": "f", "parameters": {…}}`.

    `tools` has the schema of each function's parameters, by name; references in a schema are resolved within that
    schema. Raises ValueError if a schema is nested too deeply.
    """
    rules = ["start: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, (name, schema) in enumerate(tools.items()):
        if _depth(schema) > _DEPTH_MAX:
            raise ValueError(f"has more than {_DEPTH_MAX} levels of objects and lists in the parameters of {name:.64}")
        head = json.dumps(f'{{"name": {json.dumps(name)}, "parameters": ')
        parameters = {**schema, "type": "object", "x-guidance": {"whitespace_pattern": _WHITESPACE}}
        rules += [
            f'call_{number}: {head} parameters_{number} "}}"',
            f"parameters_{number}: %json {json.dumps(parameters)}",
        ]
    return LLMatcher.grammar_from_lark("\n".join(rules))


def of_regex(pattern: str) -> str:
    """Return the grammar of the texts that match `pattern` as a whole, in the syntax of Rust's regex crate."""
    return LLMatcher.grammar_from_regex(pattern)


def of_choices(choices: Sequence[str]) -> str:
    """Return the grammar of an answer that is exactly one of these texts.

    All texts form one terminal, whose mask takes 2 ms for 10,000 texts; with one terminal per text it took half a
    second.
    """
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))


def of_ebnf(text: str) -> str:
    """Return the grammar of a text in GBNF (the EBNF of llama.cpp and XGrammar) or Lark notation.

    Raises ValueError if the text is malformed or too long.
    """
    if len(text) > _EBNF_CHARS_MAX:
        raise ValueError(f"has {len(text)} characters, the limit is {_EBNF_CHARS_MAX}")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark("\n".join(filter(str.strip, text.splitlines()))))
    except Exception as error:  # the converter raises the bare class, and any part may fail on a malformed text
        raise ValueError(f"is no grammar in EBNF ({' '.join(str(error).split())})") from error


@dataclass(slots=True)
class _Compiled:
    """A compiled grammar; copies of its matcher share the lexer's states, whose number is limited."""

    matcher: LLMatcher
    first: NDArray[np.int32] | None = None
    """The mask of the first token of an answer; None until it is computed."""
    used_up: bool = False
    """True if a copy has reached a limit, so that further answers must compile the grammar again."""


class AnswerGrammar:
    """The state of one answer in its grammar.

    Only one thread may use it at a time; masks are computed without the GIL.
    """

    def __init__(self, compiled: _Compiled, compile_again: Callable[[], LLMatcher]) -> None:
        """Create the state before the first token; `compile_again` returns a matcher with a separate lexer."""
        self._matcher = compiled.matcher.deep_copy()
        self._shared: _Compiled | None = compiled
        self._compile_again = compile_again
        self._consumed = 0
        self._mask = compiled.first
        """The mask of the token that follows the first `_consumed` answer tokens; None if it is not computed yet."""
        self._draft_masks: list[NDArray[np.int32]] = []

    def allowed(self, answer: Sequence[int], drafts: int = 0) -> NDArray[np.int32]:
        """Return the mask of the tokens that may follow `answer`, as int32 words of shape [vocab / 32].

        With `drafts`, return instead the mask of the tokens that may follow `answer` and the first `drafts` draft
        tokens that were last passed to `count_allowed` for the same answer. The lowest bit of the first word is token
        0. From call to call, `answer` may only grow. Raises InvalidArgument if the grammar exceeds its limits while the
        mask is computed, or if `answer` does not follow the grammar.
        """
        if drafts:
            return self._draft_masks[drafts - 1]
        if self._mask is None or len(answer) > self._consumed:
            self._mask = self._compute(answer)
            if not answer and self._shared is not None:
                self._shared.first = self._mask
        return self._mask

    def known(self, answer: Sequence[int]) -> bool:
        """Return True if the mask of the token after `answer` is already computed."""
        return self._mask is not None and len(answer) == self._consumed

    def count_allowed(self, answer: Sequence[int], drafts: Sequence[int]) -> int:
        """Return the number of leading draft tokens that the grammar allows after `answer`.

        Also keeps the masks after these draft tokens, for `allowed`. Raises InvalidArgument as `allowed` does, but only
        for `answer`: a draft token after which the grammar exceeds its limits is not counted.

        Returns 0 if the answer has a separate lexer, because the shared one has reached its limit. Checking draft
        tokens would use up the limit of the separate lexer, and the answer could fail earlier than without draft
        tokens.
        """
        self.allowed(answer)
        ahead, self._draft_masks = self._matcher.deep_copy(), []
        for token_id in drafts if self._shared is not None else ():
            if not ahead.try_consume_tokens([token_id]):
                break
            try:
                self._draft_masks.append(_allowed(ahead))
            except InvalidArgument:
                break
        return len(self._draft_masks)

    def _compute(self, answer: Sequence[int]) -> NDArray[np.int32]:
        """Return the mask of the token after `answer`.

        If the shared lexer has reached its limit, the answer continues with a separate lexer.
        """
        tokens, began, self._mask = len(answer) - self._consumed, time.thread_time(), None
        try:
            mask = self._advance(answer)
        except InvalidArgument:
            shared, self._shared = self._shared, None
            if shared is None:
                raise
            shared.used_up = True
            self._matcher, self._consumed = self._compile_again(), 0
            tokens, began = len(answer), time.thread_time()
            mask = self._advance(answer)
        if time.thread_time() - began > _TOKEN_S + _REPLAYED_TOKEN_S * tokens:
            if self._shared is not None:
                self._shared.used_up = True  # otherwise the next answer would reuse its states and not fail
            raise InvalidArgument(
                "grammar", f"takes more than {_TOKEN_S:g} s of processor time for a token at this point; simplify it"
            )
        return mask

    def _advance(self, answer: Sequence[int]) -> NDArray[np.int32]:
        for token_id in answer[self._consumed :]:
            # Tokens are consumed one by one, because llguidance holds the GIL while it consumes.
            self._matcher.consume_token(token_id)
        self._consumed = len(answer)
        return _allowed(self._matcher)


class Grammars:
    """Compiles and caches grammars over the tokens of one model. Thread-safe; compiling does not hold the GIL."""

    def __init__(
        self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int], cached_chars: int = _CACHED_CHARS
    ) -> None:
        """Load the tokenizer in `folder`, which takes half a second; `vocab_size` is the number of logits.

        `cached_chars` limits the total number of characters of the cached compiled grammars; the newest grammar is
        always cached. Raises ModelError if there is no usable tokenizer.
        """
        inner = load_tokenizer(folder).inner
        self._tokens = LLTokenizer(
            inner.to_str(),
            n_vocab=max(vocab_size, inner.get_vocab_size(with_added_tokens=True)),
            eos_token=list(eos_token_ids),
        )
        self._cached_chars = cached_chars
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()

    def check(self, grammar: str) -> None:
        """Compile a grammar and compute the mask of the first token, so that answers can start immediately.

        Raises InvalidArgument if either fails.
        """
        self.begin(grammar).allowed(())

    def begin(self, grammar: str) -> AnswerGrammar:
        """Return the state of a new answer in this grammar, before its first token.

        Raises InvalidArgument if the grammar cannot be compiled.
        """
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None and not known.used_up:
                self._compiled.move_to_end(grammar)
                return AnswerGrammar(known, partial(self._compile, grammar))
        known = _Compiled(self._compile(grammar))
        with self._lock:
            self._compiled[grammar] = known
            while len(self._compiled) > 1 and (
                len(self._compiled) > _CACHED_GRAMMARS or sum(map(len, self._compiled)) > self._cached_chars
            ):
                self._compiled.popitem(last=False)
            return AnswerGrammar(known, partial(self._compile, grammar))

    def _compile(self, grammar: str) -> LLMatcher:
        if len(grammar) > GRAMMAR_CHARS_MAX:
            raise InvalidArgument("grammar", f"has {len(grammar)} characters, the limit is {GRAMMAR_CHARS_MAX}")
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=limits())
        if matcher.is_error():
            raise InvalidArgument("grammar", _reason(matcher.get_error()))
        return matcher


@cache
def shared_grammars(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammars:
    """Return the `Grammars` of a model, the same object at each call; a draft model with the same tokens shares it."""
    return Grammars(folder, vocab_size, eos_token_ids)


class LazyGrammars:
    """Loads the `Grammars` when `load` is called, in parallel with other work, or else when they are first used.

    Thread-safe.
    """

    def __init__(self, make: Callable[[], Grammars]) -> None:
        self._make = make
        self._made: Grammars | None = None
        self._lock = threading.Lock()

    def load(self) -> None:
        """Load the tokenizer. If it cannot be read, no error is raised here, but by each call of `get`."""
        with suppress(ModelError):
            self.get()

    def get(self) -> Grammars:
        """Return the grammars; loads the tokenizer if it is not loaded yet. Raises ModelError if it cannot be read."""
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made


def limits() -> LLParserLimits:
    """Return the limits for llguidance's parser.

    Where llguidance's defaults allow seconds or hundreds of megabytes, the limits are a fifth of them or less.
    """
    return LLParserLimits(
        step_max_items=_ITEMS_MAX, max_lexer_states=25_000, max_grammar_size=100_000, verbose_errors=False
    )


def _allowed(matcher: LLMatcher) -> NDArray[np.int32]:
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
    if matcher.is_error():
        raise InvalidArgument("grammar", f"is too complex at this point ({_reason(matcher.get_error())}); simplify it")
    if not bits.any():
        raise InvalidArgument("grammar", "allows none of the model's tokens here")
    return bits


def _reason(error: str) -> str:
    return " ".join(error.removesuffix("<non-verbose/>").split())[:300]


def _depth(value: Any) -> int:
    """Return the depth of nested objects and lists, computed without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = [container for container in level if isinstance(container, dict | list)]
        level = [
            child for container in inner for child in (container.values() if isinstance(container, dict) else container)
        ]
    return depth
