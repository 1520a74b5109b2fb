"""Turns the messages of the Messages API into those of the internal chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.api.anthropic.body import (
    Block,
    CountTokensRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from router.api.bodies.turns import Turns
from tandem.protocol.errors import InvalidArgument


def conversation_of(body: MessagesRequest | CountTokensRequest) -> Turns:
    """Return the messages of a body; raises InvalidArgument for a block in a message of the wrong role."""
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
    """Add a message for each result of a tool, and one for the texts between two of them."""
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
            # Chat templates have no place for the mark of a failed call.
            made.result(here, block.tool_use_id, f"Error: {text}" if block.is_error else text)
        else:
            raise _misplaced(here, block)
    if texts or not blocks:
        made.add(field, role, "".join(texts))


def _misplaced(field: str, block: Block) -> InvalidArgument:
    return InvalidArgument(field, f"is a {block.type} block, which messages of this role do not have")


def _result(content: str | Sequence[TextBlock | ToolReferenceBlock]) -> str:
    """Return the text of a result; the model sees the definition of a found tool among the other tools."""
    if isinstance(content, str):
        return content
    return "".join(
        block.text if isinstance(block, TextBlock) else f"The tool {block.tool_name} can be called now.\n"
        for block in content
    )


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)
