"""Chooses the syntax by which the answers to a request are parsed into reasoning, content and tool calls."""

from __future__ import annotations

from router.config import RouterConfig
from router.requests.answer_format import AnswerFormat
from router.requests.request import ClientRequest, Conversation
from router.text.answer_syntax.formats import (
    FORCED_CALLS,
    AnswerSyntax,
    choose_calls,
    choose_reasoning,
    reasoning_opening,
)
from router.text.tokenizer import Tokenizer
from router.text.tools import ToolChoice, ToolOptions
from tandem.protocol.errors import InvalidArgument
from tandem.tokenizers.grammar_process import GrammarKind

_TAIL_TOKENS = 8
"""Number of tokens at the end of the prompt in which the opening tag of the reasoning is searched.

`<think>` may be a token per character, and a line break may follow. Other opening tags are special tokens.
"""


class AnswerSyntaxes:
    """The parsers of tool calls and reasoning that the router uses for the model. The `RequestValidator` owns it."""

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer) -> None:
        """Choose the parsers named in `config`, or by the chat template. Raises InvalidArgument for an unknown name."""
        self._tokenizer = tokenizer
        self._calls = choose_calls(config.tool_call_parser, tokenizer.template_source)
        self._reasoning = choose_reasoning(config.reasoning_parser, tokenizer.template_source)

    def check(self, request: ClientRequest) -> None:
        """Raise InvalidArgument for tool options that this server cannot serve.

        These are `tool_choice` auto without a parser for the model's calls, and a forced call together with an answer
        format.
        """
        tools, wanted = _tools(request), request.options.answer_format
        if tools.forced and wanted is not None and not wanted.text_only:
            raise InvalidArgument("tool_choice", f"cannot force a call beside {wanted.field}; send one of them")
        if tools.choice is ToolChoice.AUTO and not self._calls:
            raise InvalidArgument(
                "tools",
                "are not served: how this model writes calls is not known; send tool_choice required or a function,"
                " leave tools out, or start the server with --tool-call-parser",
            )

    def of(self, request: ClientRequest, ids: tuple[int, ...]) -> AnswerSyntax | None:
        """Return the syntax for parsing the answers to the prompt `ids`; None if their text is not parsed."""
        if not isinstance(request.prompt, Conversation) or not request.prompt.parsed:
            return None
        tools = _tools(request)
        if tools.forced:
            return AnswerSyntax(FORCED_CALLS, tools=tools.schemas, forced=True)
        calls = self._calls if tools.choice is not ToolChoice.NONE else ""
        # With a format, the grammar constrains the answer from its first token, so there is no reasoning.
        reasoning = self._reasoning if request.options.answer_format is None else ""
        if not calls and not reasoning:
            return None
        tail = b"".join(map(self._tokenizer.token_bytes, ids[-_TAIL_TOKENS:])).rstrip()
        opening = reasoning_opening(reasoning).rstrip().encode()
        opened = bool(opening) and tail.endswith(opening)
        syntax = AnswerSyntax(calls, reasoning, opened, tools.schemas, tools.parallel)
        return syntax.keeping(self._tokenizer.special_ids(syntax.markers))


def wanted_format(request: ClientRequest) -> AnswerFormat | None:
    """Return the format that the answers must follow; None for any text.

    If `tool_choice` forces a tool call, it is the format of the tool call.
    """
    tools = _tools(request)
    if not tools.forced:
        return request.options.answer_format
    schemas = tools.schemas
    chosen = {tools.function: schemas[tools.function]} if tools.function else schemas
    return AnswerFormat("tools", GrammarKind.TOOL_CALL, chosen)


def _tools(request: ClientRequest) -> ToolOptions:
    return request.prompt.tools if isinstance(request.prompt, Conversation) else ToolOptions()
