"""Structured output: the format that a client requests for an answer, and its compilation to a grammar.

Grammars are compiled in separate processes, because one compilation may take seconds.
"""

from __future__ import annotations

import dataclasses
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
"""Number of processes that compile grammars; with two, a grammar that takes two seconds does not block the others."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of an answer as a client gave it, not validated. An immutable part of `Options`."""

    field: str
    """The name of the request field that sets the format, for error messages."""
    kind: GrammarKind
    value: Mapping[str, Any] | bool | str | Sequence[str]
    """The content for `kind`: a JSON schema or its text, a pattern, a grammar, choices, or parameter schemas."""
    text_only: bool = False
    """True if the format applies only to the answer's text; such a format does not conflict with a forced tool call."""

    chars: int = dataclasses.field(init=False, default=0)
    """The approximate size in characters; computed while the body is parsed (large bodies: in a thread)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "chars", len(str(self.value)))


class FormatCompiler:
    """Compiles formats to grammars in separate processes; tenants share them fairly.

    The `RequestValidator` owns it. All calls are on the event loop; `close` ends the processes.
    """

    def __init__(self, config: RouterConfig) -> None:
        """`config.served.tokenizer_folder` contains the model's tokenizer, from which the grammars are compiled."""
        self._folder = config.served.tokenizer_folder
        waits = "formats of answers wait to be compiled"
        # One process is left to the other tenants, even if the grammars of one tenant take very long.
        per_tenant = _PROCESSES - 1
        self._pool = TokenizerPool(_PROCESSES, config.max_tokenizing_bytes, config.retry_after_s, waits, per_tenant)
        self._processes: _Processes | None = None
        self._unwanted: set[threading.Event] = set()
        """One event per format that waits or is being compiled; setting the event cancels the compilation."""

    async def grammar(self, tenant: str, wanted: AnswerFormat, facts: ModelFacts) -> str:
        """Compile the format and return the checked grammar; if the caller is cancelled, the compilation is cancelled.

        Raises InvalidArgument, which names the format's field, if the format is malformed, not supported or too large,
        and Refused if too many formats wait.
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
        """Cancel all compilations and end the processes."""
        self._pool.close()
        for unwanted in self._unwanted:
            unwanted.set()
        if self._processes is not None:
            self._processes.close()


class _Processes:
    """The processes that compile grammars for one vocabulary; called by the threads of the `FormatCompiler`'s pool."""

    def __init__(self, tokens: GrammarTokens) -> None:
        self.tokens = tokens
        self._all = [GrammarProcess(tokens) for _ in range(_PROCESSES)]
        self._idle = [*self._all]
        """The idle processes; the last is used first, so the other starts only if two formats are compiled at once."""

    def make(self, wanted: AnswerFormat, unwanted: threading.Event) -> str:
        """Compile the format and return the checked grammar. Raises InvalidArgument, which names the format's field."""
        process = self._idle.pop()
        try:
            return process.make(wanted.kind, _value(wanted), unwanted)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(wanted.field, str(error)) from error
        finally:
            self._idle.append(process)

    def close(self) -> None:
        """End the processes; each finishes its current compilation first."""
        for process in self._all:
            process.close()


def _value(wanted: AnswerFormat) -> Any:
    """Return the value to compile; the text of a JSON schema is parsed.

    Raises ValueError if it is empty or malformed.
    """
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
