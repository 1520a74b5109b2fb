"""The format that a client wants of an answer (structured output), and the grammar made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from router.text.tokenizing import TokenizerPool
from vocabulary.grammar_process import GrammarKind, GrammarProcess
from vocabulary.grammars import GRAMMAR_CHARS_MAX, Grammars, LazyGrammars
from wire.errors import InvalidArgument, ModelError
from wire.messages import ModelFacts


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """A format as a client gave it, unchecked."""

    field: str
    """The client's name of the field, for errors."""
    kind: GrammarKind
    value: Mapping[str, Any] | bool | str | Sequence[str]
    """A JSON schema, or its text; a pattern; a grammar; the choices; or schemas of parameters by function."""
    text_only: bool = False
    """True if only the text of an answer follows it: a call that `tool_choice` forces has none."""

    @property
    def chars(self) -> int:
        """Return about how many characters it has."""
        return len(self.value) if isinstance(self.value, str) else len(str(self.value))


class FormatCompiler:
    """Makes grammars of formats, in the tokenizer's threads."""

    def __init__(self, folder: Path, pool: TokenizerPool) -> None:
        """`folder` has the model's tokenizer."""
        self._folder = folder
        self._pool = pool
        self._process = GrammarProcess()
        self._of: tuple[ModelFacts, LazyGrammars] | None = None

    async def grammar(self, tenant: str, wanted: AnswerFormat, facts: ModelFacts) -> str:
        """Return the checked grammar.

        Raises InvalidArgument with the format's field for one that is malformed, not supported or too large.
        """
        if self._of is None or self._of[0] != facts:
            make = partial(Grammars, self._folder, facts.vocab_size, facts.eos_token_ids)
            self._of = facts, LazyGrammars(make)
        return await self._pool.run(tenant, wanted.chars, partial(self._compile, wanted, self._of[1]))

    def close(self) -> None:
        """End the process that makes grammars."""
        self._process.close()

    def _compile(self, wanted: AnswerFormat, known: LazyGrammars) -> str:
        try:
            grammar = self._process.make(wanted.kind, _value(wanted))
            known.check(grammar)
        except InvalidArgument as error:
            raise InvalidArgument(wanted.field, f"cannot be followed: {error.problem}") from error
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(wanted.field, str(error)) from error
        except ModelError as error:
            raise InvalidArgument(wanted.field, f"needs the model's tokenizer: {error.message}") from error
        return grammar


def _value(wanted: AnswerFormat) -> Any:
    """Return the value of which the grammar is made; raises ValueError for an empty or malformed one."""
    value = wanted.value
    if isinstance(value, str) and not value:
        raise ValueError("is empty")
    if isinstance(value, str) and len(value) > GRAMMAR_CHARS_MAX:
        raise ValueError(f"has {len(value)} characters, the limit is {GRAMMAR_CHARS_MAX}")
    if wanted.kind is GrammarKind.CHOICE and not (value and isinstance(value, tuple) and all(value)):
        raise ValueError("must be a list of texts that are not empty")
    if wanted.kind is not GrammarKind.JSON_SCHEMA:
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"is not valid JSON ({error})") from error
    if not isinstance(value, dict | bool):
        raise ValueError("must be a JSON schema, an object")
    return value
