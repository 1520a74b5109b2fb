"""The format that a client wants of an answer (structured output), and the grammar made of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from router.config import RouterConfig
from router.text.tokenizing import TokenizerPool
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import ModelFacts
from tandem.tokenizers.grammar_process import GrammarKind, GrammarProcess, GrammarTokens
from tandem.tokenizers.grammars import GRAMMAR_CHARS_MAX

_PROCESSES = 2
"""Processes that compile grammars, so that one that takes its two seconds does not stop the others."""


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
    """Makes grammars of formats in processes of their own, fairly between tenants. Belongs to the event loop."""

    def __init__(self, config: RouterConfig) -> None:
        """`config.tokenizer_folder` has the model's tokenizer."""
        self._folder = config.tokenizer_folder
        waits = "formats of answers wait to be compiled"
        # A tenant whose grammars take all of their time leaves a process to the others.
        per_tenant = _PROCESSES - 1
        self._pool = TokenizerPool(_PROCESSES, config.max_tokenizing_bytes, config.retry_after_s, waits, per_tenant)
        self._processes: _Processes | None = None
        self._unwanted: set[threading.Event] = set()
        """Set to end the compilation of a request; one for each that waits or is compiled."""

    async def grammar(self, tenant: str, wanted: AnswerFormat, facts: ModelFacts) -> str:
        """Return the checked grammar. Cancelling the caller ends its compilation.

        Raises InvalidArgument with the format's field for one that is malformed, not supported or too large, Refused
        if too many wait.
        """
        tokens = GrammarTokens(self._folder, facts.vocab_size, tuple(facts.eos_token_ids))
        processes = self._processes
        if processes is None or processes.tokens != tokens:
            if processes is not None:
                await self._pool.run(tenant, 0, processes.close)
            processes = self._processes = _Processes(tokens)
        unwanted = threading.Event()
        self._unwanted.add(unwanted)
        try:
            return await self._pool.run(tenant, wanted.chars, partial(processes.make, wanted, unwanted))
        finally:
            unwanted.set()
            self._unwanted.discard(unwanted)

    def close(self) -> None:
        """End the processes that make grammars."""
        self._pool.close()
        for unwanted in self._unwanted:
            unwanted.set()
        if self._processes is not None:
            self._processes.close()


class _Processes:
    """The processes that compile for one set of tokens. Thread-safe."""

    def __init__(self, tokens: GrammarTokens) -> None:
        self.tokens = tokens
        self._all = [GrammarProcess(tokens) for _ in range(_PROCESSES)]
        self._idle = [*self._all]
        """The last one is used next: another one starts only for grammars at the same time."""

    def make(self, wanted: AnswerFormat, unwanted: threading.Event) -> str:
        """Return the checked grammar; raises InvalidArgument with the format's field."""
        process = self._idle.pop()
        try:
            return process.make(wanted.kind, _value(wanted), unwanted)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(wanted.field, str(error)) from error
        finally:
            self._idle.append(process)

    def close(self) -> None:
        """End the processes; each waits for the grammar that it compiles."""
        for process in self._all:
            process.close()


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
