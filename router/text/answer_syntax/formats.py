"""The known answer syntaxes under vLLM's parser names, and the choice of a syntax by a model's chat template."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial

from router.text.answer_syntax import gemma_calls, reasoning, tagged_calls, tool_calls
from router.text.answer_syntax.parser import AnswerParser, AnswerParts
from router.text.answer_syntax.reader import AnswerReader, Steps
from tandem.protocol.errors import InvalidArgument

AUTO, NONE = "auto", "none"
_HARMONY_CALLS, _HARMONY, _HARMONY_SIGN = "openai", "openai_gptoss", "<|channel|>"
_OPENED = "deepseek_r1"
"""The reasoning parser for models whose answers always start inside the reasoning block."""
_MISTRAL, _GEMMA = "mistral", "gemma4"
_MISTRAL_ID_CHARS = 9
"""The number of characters of a call id that Mistral's chat templates accept."""

_CALLS: Mapping[str, Callable[[AnswerReader, AnswerParts, tagged_calls.Schemas], Steps[None]]] = {
    "hermes": tool_calls.read_hermes,
    "llama3_json": tool_calls.read_llama,
    _MISTRAL: tool_calls.read_mistral,
    "deepseek_v3": tool_calls.read_deepseek,
    "deepseek_v32": partial(tagged_calls.read_xml, tags=tagged_calls.DEEPSEEK_DSML),
    "kimi_k2": tool_calls.read_kimi,
    "qwen3_coder": partial(tagged_calls.read_xml, tags=tagged_calls.QWEN_CODER),
    "minimax_m2": partial(tagged_calls.read_xml, tags=tagged_calls.MINIMAX),
    "glm45": tagged_calls.read_glm45,
    _GEMMA: gemma_calls.read_gemma,
}
_CALL_MARKERS: Mapping[str, tuple[str, ...]] = {
    "llama3_json": (tool_calls.PYTHON_TAG,),
    _MISTRAL: (tool_calls.TOOL_CALLS, tool_calls.ARGS, tool_calls.CALL_ID),
    "deepseek_v3": astuple(tool_calls.DEEPSEEK),
    "deepseek_v32": (tagged_calls.DSML,),
    "kimi_k2": astuple(tool_calls.KIMI),
    "qwen3_coder": (tagged_calls.QWEN_CODER.block, tagged_calls.QWEN_CODER.block_end),
    "minimax_m2": (tagged_calls.MINIMAX.block, tagged_calls.MINIMAX.block_end),
    "glm45": tagged_calls.GLM_TAGS,
    _GEMMA: (gemma_calls.CALL, gemma_calls.CALL_END, gemma_calls.QUOTE),
    _HARMONY_CALLS: reasoning.HARMONY,
}
_THINKING: Mapping[str, reasoning.Tags] = {
    "qwen3": reasoning.THINK,
    _OPENED: reasoning.THINK,
    _MISTRAL: reasoning.MISTRAL_THINK,
    _GEMMA: reasoning.GEMMA_THINK,
}
"""For each reasoning parser but gpt-oss's, the tags around the reasoning."""
_REASONING_MARKERS: Mapping[str, tuple[str, ...]] = {
    **_THINKING,
    _GEMMA: reasoning.GEMMA_CHANNEL,
    _HARMONY: reasoning.HARMONY,
}
"""For each parser, the markers that some tokenizers have as special tokens; so is `_CALL_MARKERS`."""
_CALLS_OF_TEMPLATES: Sequence[tuple[str, tuple[str, ...]]] = (
    (_HARMONY_CALLS, (_HARMONY_SIGN,)),
    ("deepseek_v3", (tool_calls.DEEPSEEK.call_begin,)),
    ("deepseek_v32", (tagged_calls.DSML,)),
    ("kimi_k2", ("tool_declare<|im_middle|>",)),
    (_MISTRAL, (tool_calls.TOOL_CALLS,)),
    ("minimax_m2", (tagged_calls.MINIMAX.block,)),
    (_GEMMA, (gemma_calls.CALL,)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", (tool_calls.PYTHON_TAG,)),
    ("llama3_json", ('"parameters": ',)),
)
"""The tool call parser of a chat template is that of the first row whose texts all occur in the template."""
_REASONING_OF_TEMPLATES: Sequence[tuple[str, str]] = (
    (_HARMONY, _HARMONY_SIGN),
    (_GEMMA, reasoning.GEMMA_CHANNEL[1]),
    (_MISTRAL, reasoning.MISTRAL_THINK[0]),
    ("qwen3", reasoning.THINK[0]),
    ("qwen3", reasoning.THINK[1]),
)
"""The reasoning parser of a chat template is that of the first row whose text occurs in the template."""
FORCED_CALLS = "llama3_json"
"""The parser of tool calls that a grammar forces (`tandem.tokenizers.grammars.of_tool_calls`), for all models."""
TOOL_CALL_PARSERS = (*_CALLS, _HARMONY_CALLS)
REASONING_PARSERS = (*_THINKING, _HARMONY)


def choose_calls(option: str, template: str) -> str:
    """Return the name of the tool call parser for the setting `option`; `auto` chooses by the chat template.

    "" means no parser. Raises InvalidArgument for an unknown name.
    """
    if option != AUTO:
        return "" if option == NONE else _known("tool_call_parser", option, TOOL_CALL_PARSERS)
    return next((name for name, texts in _CALLS_OF_TEMPLATES if all(text in template for text in texts)), "")


def choose_reasoning(option: str, template: str) -> str:
    """Return the name of the reasoning parser for the setting `option`; `auto` chooses by the chat template.

    "" means no parser. Raises InvalidArgument for an unknown name.
    """
    if option != AUTO:
        return "" if option == NONE else _known("reasoning_parser", option, REASONING_PARSERS)
    return next((name for name, text in _REASONING_OF_TEMPLATES if text in template), "")


def reasoning_opening(name: str) -> str:
    """Return the opening tag of the reasoning parser `name`; "" if it has none."""
    return _THINKING[name][0] if name in _THINKING else ""


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
        return (*_CALL_MARKERS.get(self.calls, ()), *_REASONING_MARKERS.get(self.reasoning, ()))

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
            yield from reasoning.read_thinking(reader, parts, _THINKING[self.reasoning], opened=opened)
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
