"""The syntaxes in which models write their reasoning: a block between two tags, and the channels of gpt-oss."""

from __future__ import annotations

import re

from router.text.answer_syntax.parser import AnswerParts
from router.text.answer_syntax.reader import AnswerReader, Steps

Tags = tuple[str, str]
"""The opening and the closing tag of the reasoning."""
THINK: Tags = ("<think>", "</think>")
MISTRAL_THINK: Tags = ("[THINK]", "[/THINK]")
GEMMA_CHANNEL: Tags = ("<|channel>", "<channel|>")
GEMMA_THINK: Tags = (f"{GEMMA_CHANNEL[0]}thought\n", GEMMA_CHANNEL[1])
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


def read_thinking(reader: AnswerReader, parts: AnswerParts, tags: Tags, *, opened: bool) -> Steps[None]:
    """Read reasoning at the beginning of the answer; `opened` is True if the prompt ends with the opening tag."""
    if not opened:
        space = yield from reader.space()
        if not (yield from reader.literal(tags[0])):
            parts.content(space)
            return
    yield from reader.until(tags[1:], parts.reasoning)
    yield from reader.space()


def read_harmony(reader: AnswerReader, parts: AnswerParts, *, calls: bool) -> Steps[None]:
    """Read all messages of a gpt-oss answer (https://cookbook.openai.com/articles/openai-harmony).

    The channel `analysis` is reasoning, and a message to a function is a tool call if `calls` is True.
    """
    while marker := (yield from reader.until((_START, _CHANNEL), parts.content)):
        header = [marker]
        if not (yield from reader.until((_MESSAGE,), header.append)):
            parts.content("".join(header))
            return
        text = "".join(header)
        recipient = _RECIPIENT.search(text) if calls else None
        if recipient is not None:
            parts.begin_call(recipient.group(1))
            to = parts.arguments
        else:
            to = parts.reasoning if _ANALYSIS.search(text) else parts.content
        yield from reader.until(_ENDS, to)
