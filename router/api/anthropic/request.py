"""Turns the bodies of the Messages API into internal chat requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from router.api.anthropic.body import (
    Block,
    ClientTool,
    CountTokensRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from router.api.body import UnknownFields, read_body
from router.api.cache_hints import CacheControl, retention_of
from router.api.call import ApiCall, FieldNames, Turns
from router.requests.answer_format import AnswerFormat
from router.requests.request import ClientRequest, Conversation, Options
from router.text.tools import ToolChoice, ToolOptions, function_tool
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.lifecycle.events import EventTime
from tandem.tokenizers.grammar_process import GrammarKind


def conversation_of(body: MessagesRequest | CountTokensRequest) -> Turns:
    """Return the messages of a body.

    Raises InvalidArgument for a block that is not allowed in a message of its role.
    """
    made = Turns()
    if body.system:
        made.add("system", "system", _joined(body.system))
    for number, message in enumerate(body.messages):
        field = f"messages[{number}]"
        if isinstance(message.content, str):
            made.add(field, message.role, message.content)
        elif message.role == "assistant":
            _add_answer(made, field, message.content)
        else:
            _add_texts_and_results(made, field, message.role, message.content)
    return made


def _add_answer(made: Turns, field: str, blocks: Sequence[Block]) -> None:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for number, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            calls.append(made.call(block.id, block.name, block.input))
        elif isinstance(block, ToolResultBlock):
            raise _misplaced(f"{field}.content[{number}]", block)
    made.add(field, "assistant", "".join(texts), tool_calls=calls, reasoning_content="".join(thoughts))


def _add_texts_and_results(made: Turns, field: str, role: str, blocks: Sequence[Block]) -> None:
    """Add one message per tool result, and one message for all texts between two tool results."""
    texts: list[str] = []
    for number, block in enumerate(blocks):
        here = f"{field}.content[{number}]"
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock) and role == "user":
            if texts:
                made.add(field, role, "".join(texts))
                texts = []
            text = _result(block.content or "")
            # Chat templates cannot mark a result as failed, so the text must say it.
            made.result(here, block.tool_use_id, f"Error: {text}" if block.is_error else text)
        else:
            raise _misplaced(here, block)
    if texts or not blocks:
        made.add(field, role, "".join(texts))


def _misplaced(field: str, block: Block) -> InvalidArgument:
    return InvalidArgument(field, f"is a {block.type} block, which messages of this role do not have")


def _result(content: str | Sequence[TextBlock | ToolReferenceBlock]) -> str:
    """Return the text of a tool result.

    A tool reference becomes the sentence that the tool can be called; the prompt's list of tools defines the tool.
    """
    if isinstance(content, str):
        return content
    return "".join(
        block.text if isinstance(block, TextBlock) else f"The tool {block.tool_name} can be called now.\n"
        for block in content
    )


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


_CHOICES = {"auto": ToolChoice.AUTO, "any": ToolChoice.REQUIRED, "tool": ToolChoice.FUNCTION, "none": ToolChoice.NONE}
_RENAMED = {"stop": "stop_sequences"}


def parse_message(data: bytes, received: EventTime, *, strict: bool = False) -> ApiCall:
    """Parse the body of /v1/messages.

    Raises InvalidArgument, which names the field, for a wrong field, and with `strict` for an unknown one.
    """
    unknown = UnknownFields(strict=strict)
    body = read_body(MessagesRequest, data, unknown)
    if body.messages and body.messages[-1].role == "assistant":
        message = "is the assistant's, and the beginning of an answer cannot be given; end with a message of the user"
        raise InvalidArgument(f"messages[{len(body.messages) - 1}]", message)
    stop = tuple(body.stop_sequences or ())
    options = body.options(
        max_tokens=body.max_tokens,
        stop=stop,
        answer_format=_format(body),
        cache_retention_s=retention_of(_cache_controls(body)),
    )
    return _call(body, options, received, unknown, stream=bool(body.stream))


def _cache_controls(body: MessagesRequest) -> Iterator[CacheControl | None]:
    yield body.cache_control
    yield from (tool.cache_control for tool in body.tools or ())
    contents = [body.system, *(message.content for message in body.messages)]
    yield from _controls_of(
        chain.from_iterable(content for content in contents if content and not isinstance(content, str))
    )


def _controls_of(blocks: Iterable[Block]) -> Iterator[CacheControl | None]:
    for block in blocks:
        if isinstance(block, TextBlock | ToolUseBlock | ToolResultBlock):
            yield block.cache_control
        if isinstance(block, ToolResultBlock) and block.content and not isinstance(block.content, str):
            yield from (part.cache_control for part in block.content)


def _hinted_turns(body: MessagesRequest, made: Turns) -> int | None:
    """Return the number of turns up to the one with the last `cache_control`; None if it is in the last turn or absent.

    A breakpoint within a turn counts for the whole turn, and one of the tools for the system prompt as well.
    """
    last = -1
    if any(tool.cache_control for tool in body.tools or ()) or _has_breakpoint(body.system):
        last = 0 if body.system else -1
    for number, message in enumerate(body.messages):
        if _has_breakpoint(message.content):
            field = f"messages[{number}]"
            last = max(place for place, turn_field in enumerate(made.fields) if turn_field.startswith(field))
    return last + 1 if 0 <= last < len(made.turns) - 1 and body.cache_control is None else None


def _has_breakpoint(content: str | Sequence[Block] | None) -> bool:
    return not isinstance(content, str) and any(_controls_of(content or ()))


def parse_count(data: bytes, received: EventTime, *, strict: bool = False) -> ApiCall:
    """Parse the body of /v1/messages/count_tokens; arguments and errors are those of `parse_message`."""
    unknown = UnknownFields(strict=strict)
    return _call(read_body(CountTokensRequest, data, unknown), Options(), received, unknown, stream=False)


def _call(
    body: MessagesRequest | CountTokensRequest,
    options: Options,
    received: EventTime,
    unknown: UnknownFields,
    *,
    stream: bool,
) -> ApiCall:
    made = conversation_of(body)
    request = ClientRequest("", body.model or "", _conversation(body, made), options, received)
    names = FieldNames(tuple(made.fields), _RENAMED)
    return ApiCall(requests=(request,), stream=stream, ignored=unknown.names, names=names)


def _conversation(body: MessagesRequest | CountTokensRequest, made: Turns) -> Conversation:
    for number, edit in enumerate((body.context_management and body.context_management.edits) or ()):
        if not edit.type.startswith("clear_thinking_"):
            message = "is not supported, as conversations are never edited; send a shorter one"
            raise InvalidArgument(f"context_management.edits[{number}]", message)
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    variables |= body.chat_template_kwargs or {}
    hinted = _hinted_turns(body, made) if isinstance(body, MessagesRequest) else None
    return Conversation(tuple(made.turns), variables, _tools(body), parsed=True, hinted_turns=hinted)


def _tools(body: MessagesRequest | CountTokensRequest) -> ToolOptions:
    referenced = _referenced_tools(body)
    tools = [
        _tool(f"tools[{number}]", tool)
        for number, tool in enumerate(body.tools or ())
        if not tool.defer_loading or tool.name in referenced
    ]
    wanted = body.tool_choice
    if wanted is None:
        return ToolOptions(tuple(tools), ToolChoice.AUTO if tools else ToolChoice.NONE)
    choice = _CHOICES[wanted.type]
    options = ToolOptions(
        tuple(tools),
        ToolChoice.NONE if choice is ToolChoice.AUTO and not tools else choice,
        wanted.name or "" if choice is ToolChoice.FUNCTION else "",
        not wanted.disable_parallel_tool_use,
    )
    if options.forced and not tools:
        raise InvalidArgument("tool_choice", "needs tools; send them, or leave it out")
    if choice is ToolChoice.FUNCTION and options.function not in options.schemas:
        raise InvalidArgument("tool_choice.name", "is the name of none of the tools")
    return options


def _referenced_tools(body: MessagesRequest | CountTokensRequest) -> set[str]:
    """Return the names of the tools that tool searches have found in the conversation."""
    blocks = (block for message in body.messages if not isinstance(message.content, str) for block in message.content)
    results = (block.content for block in blocks if isinstance(block, ToolResultBlock))
    parts = (part for content in results if content and not isinstance(content, str) for part in content)
    return {part.tool_name for part in parts if isinstance(part, ToolReferenceBlock)}


def _tool(field: str, tool: ClientTool) -> dict[str, Any]:
    """Return a tool in the form of chat templates; the examples of its input become part of its schema."""
    if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
        message = "has no direct, but only the model calls tools here, as the server runs none"
        raise InvalidArgument(f"{field}.allowed_callers", message)
    examples = {"examples": tool.input_examples} if tool.input_examples else {}
    return function_tool(tool.name, tool.description, {**examples, **tool.input_schema})


def _format(body: MessagesRequest) -> AnswerFormat | None:
    formats = [
        AnswerFormat(f"{field}.schema", GrammarKind.JSON_SCHEMA, wanted.json_schema, text_only=True)
        for field, wanted in (
            ("output_config.format", body.output_config.format if body.output_config else None),
            ("output_format", body.output_format),
        )
        if wanted is not None
    ]
    if len(formats) > 1:
        raise InvalidArgument("output_format", "cannot be combined with output_config.format; send one of them")
    return formats[0] if formats else None
