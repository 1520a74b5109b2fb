"""The format that a client wants of an answer (structured output), and the grammar made of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from router.text.tokenizing import TokenizerPool
from vocabulary import grammars
from vocabulary.grammars import Grammars, LazyGrammars
from wire.errors import InvalidArgument, ModelError
from wire.messages import ModelFacts

_REASON_CHARS = 300
"""Most characters of a library's reason in an error."""


class FormatKind(StrEnum):
    """The notation of a format."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "grammar"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """A format as a client gave it, unchecked."""

    field: str
    """The client's name of the field, for errors."""
    kind: FormatKind
    value: Mapping[str, Any] | bool | str | Sequence[str]
    """A JSON schema, or its text; a pattern; a grammar; the choices; or schemas of parameters by function."""

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
        self._of: tuple[ModelFacts, LazyGrammars] | None = None

    async def grammar(self, tenant: str, wanted: AnswerFormat, facts: ModelFacts) -> str:
        """Return the checked grammar.

        Raises InvalidArgument with the format's field for one that is malformed, not supported or too large.
        """
        if self._of is None or self._of[0] != facts:
            make = partial(Grammars, self._folder, facts.vocab_size, facts.eos_token_ids)
            self._of = facts, LazyGrammars(make)
        return await self._pool.run(tenant, wanted.chars, partial(_compile, wanted, self._of[1]))


def _compile(wanted: AnswerFormat, known: LazyGrammars) -> str:
    try:
        grammar = _MAKERS[wanted.kind](wanted.value)
        known.check(grammar)
    except InvalidArgument as error:
        raise InvalidArgument(
            wanted.field, f"cannot be followed: {error.message.removeprefix(f'{error.field}: ')}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(wanted.field, str(error)[:_REASON_CHARS]) from error
    except ModelError as error:
        raise InvalidArgument(wanted.field, f"needs the model's tokenizer: {error.message}") from error
    return grammar


def _of_json(value: Any) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"is not valid JSON ({error})") from error
    if not isinstance(value, dict | bool):
        raise ValueError("must be a JSON schema, an object")
    return grammars.of_json_schema(value)


def _of_text(make: Callable[[str], str]) -> Callable[[str], str]:
    def checked(value: str) -> str:
        if not value:
            raise ValueError("is empty")
        return make(value)

    return checked


def _of_choices(value: Sequence[str]) -> str:
    if not value or not all(value):
        raise ValueError("must be a list of texts that are not empty")
    return grammars.of_choices(value)


_MAKERS: Mapping[FormatKind, Callable[[Any], str]] = {
    FormatKind.JSON_SCHEMA: _of_json,
    FormatKind.REGEX: _of_text(grammars.of_regex),
    FormatKind.CHOICE: _of_choices,
    FormatKind.TOOL_CALL: grammars.of_tool_calls,
    FormatKind.EBNF: _of_text(grammars.of_ebnf),
}
