"""The known answer syntaxes under vLLM's parser names, and the choice of a syntax by a model's chat template."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from router.text.answer_syntax import reasoning, tagged_calls, tool_calls
from router.text.answer_syntax.parser import AnswerParser, AnswerParts
from router.text.answer_syntax.reader import AnswerReader, Steps
from tandem.protocol.errors import InvalidArgument

AUTO, NONE = "auto", "none"
_HARMONY_CALLS, _HARMONY = "openai", "openai_gptoss"
_OPENED = "deepseek_r1"
"""The reasoning parser for models whose answers always start inside the reasoning block."""
_MISTRAL = "mistral"
_MISTRAL_ID_CHARS = 9
"""The number of characters of a call id that Mistral's chat templates accept."""

_CALLS: Mapping[str, Callable[[AnswerReader, AnswerParts, tagged_calls.Schemas], Steps[None]]] = {
    "hermes": tool_calls.read_hermes,
    "llama3_json": tool_calls.read_llama,
    _MISTRAL: tool_calls.read_mistral,
    "deepseek_v3": tool_calls.read_deepseek,
    "qwen3_coder": tagged_calls.read_qwen3_coder,
    "glm45": tagged_calls.read_glm45,
}
_MARKERS: Mapping[str, tuple[str, ...]] = {
    "llama3_json": (tool_calls.PYTHON_TAG,),
    _MISTRAL: (tool_calls.TOOL_CALLS, tool_calls.ARGS, tool_calls.CALL_ID),
    "deepseek_v3": (
        tool_calls.CALLS_BEGIN,
        tool_calls.CALLS_END,
        tool_calls.CALL_BEGIN,
        tool_calls.CALL_END,
        tool_calls.SEPARATOR,
    ),
    "qwen3_coder": tagged_calls.CODER_TAGS,
    "glm45": tagged_calls.GLM_TAGS,
    "qwen3": (reasoning.THINK, reasoning.THINK_END),
    _OPENED: (reasoning.THINK, reasoning.THINK_END),
    _HARMONY: reasoning.HARMONY,
}
"""For each parser, the markers that some tokenizers have as special tokens."""
_TAGGED = {"qwen3_coder": "<function=", "glm45": "<arg_key>"}
"""For each parser of tagged calls, the text by which a chat template with such `<tool_call>` blocks is recognized."""
FORCED_CALLS = "llama3_json"
"""The parser of tool calls that a grammar forces (`tandem.tokenizers.grammars.of_tool_calls`), for all models."""
TOOL_CALL_PARSERS = (*_CALLS, _HARMONY_CALLS)
REASONING_PARSERS = ("qwen3", _OPENED, _HARMONY)


def choose_calls(option: str, template: str) -> str:
    """Return the name of the tool call parser for the setting `option`; `auto` chooses by the chat template.

    "" means no parser. Raises InvalidArgument for an unknown name.
    """
    if option != AUTO:
        return "" if option == NONE else _known("tool_call_parser", option, TOOL_CALL_PARSERS)
    if "<|channel|>" in template:
        return _HARMONY_CALLS
    if tool_calls.CALL_BEGIN in template:
        return "deepseek_v3"
    if tool_calls.TOOL_CALLS in template:
        return _MISTRAL
    if "<tool_call>" in template:
        return next((name for name, tag in _TAGGED.items() if tag in template), "hermes")
    return "llama3_json" if tool_calls.PYTHON_TAG in template or '"parameters": ' in template else ""


def choose_reasoning(option: str, template: str) -> str:
    """Return the name of the reasoning parser for the setting `option`; `auto` chooses by the chat template.

    "" means no parser. Raises InvalidArgument for an unknown name.
    """
    if option != AUTO:
        return "" if option == NONE else _known("reasoning_parser", option, REASONING_PARSERS)
    if "<|channel|>" in template:
        return _HARMONY
    return "qwen3" if reasoning.THINK in template or reasoning.THINK_END in template else ""


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """The syntax by which one request's answers are parsed into reasoning, content and calls; part of `Admitted`."""

    calls: str = ""
    """The name of the tool call parser; "" = tool calls are not parsed."""
    reasoning: str = ""
    """The name of the reasoning parser; "" = reasoning is not parsed."""
    opened: bool = False
    """True if the prompt ends with the opening tag of the reasoning, which the answer then lacks."""
    tools: tagged_calls.Schemas = field(default_factory=dict)
    """The parameter schemas of the functions that the client offers, by function name."""
    parallel: bool = True
    """False if only the first tool call is returned."""
    forced: bool = False
    """True if the answer must be a tool call and nothing else."""
    kept: Mapping[int, str] = field(default_factory=dict)
    """The special tokens that are markers, by token id; other special tokens are left out of the text."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that the tool call parser and the reasoning parser look for."""
        harmony = reasoning.HARMONY if self.calls == _HARMONY_CALLS else ()
        return (*_MARKERS.get(self.calls, ()), *_MARKERS.get(self.reasoning, ()), *harmony)

    def keeping(self, kept: Mapping[int, str]) -> AnswerSyntax:
        """Return a copy of the syntax with `kept` set."""
        return replace(self, kept=kept)

    def parser(self) -> AnswerParser:
        """Return a new parser for one answer."""
        make_id = _short_id if self.calls == _MISTRAL else _call_id
        return AnswerParser(AnswerParts(make_id, parallel=self.parallel), self._read)

    def _read(self, reader: AnswerReader, parts: AnswerParts) -> Steps[None]:
        if self.reasoning == _HARMONY or self.calls == _HARMONY_CALLS:
            yield from reasoning.read_harmony(reader, parts, calls=bool(self.calls))
            return
        if self.reasoning:
            opened = self.opened or self.reasoning == _OPENED
            yield from reasoning.read_thinking(reader, parts, opened=opened)
        if self.calls:
            yield from _CALLS[self.calls](reader, parts, self.tools)
        else:
            yield from reader.until((), parts.content)


def _known(setting: str, name: str, names: Collection[str]) -> str:
    if name not in names:
        raise InvalidArgument(setting, f"is {name!r}, it must be {AUTO}, {NONE} or one of {', '.join(names)}")
    return name


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _short_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_MISTRAL_ID_CHARS))
