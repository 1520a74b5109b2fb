"""The chat templates that Tandem ships."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.text.answer_syntax.formats import AnswerSyntax, choose_calls
from router.text.chat_template import ChatTemplate, ChatTurn, PromptEnd
from router.text.chat_template_files import read_template

OWN = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The template that is published with SmolLM2-135M-Instruct."""
USER, SYSTEM = ChatTurn("user", "Hi"), ChatTurn("system", "Be brief.")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "fg"]


@pytest.fixture
def template(tmp_path: Path) -> ChatTemplate:
    return ChatTemplate(read_template("smollm2", tmp_path), {})


@pytest.mark.parametrize("end", [PromptEnd.NEXT_TURN, PromptEnd.LAST_TURN])
@pytest.mark.parametrize("turns", [[USER], [SYSTEM, USER], [USER, ChatTurn("assistant", "Yes"), SYSTEM, USER]])
def test_prompts_without_tools_are_those_of_smollm2(
    template: ChatTemplate, turns: list[ChatTurn], end: PromptEnd
) -> None:
    assert template.render(turns, end=end) == ChatTemplate(OWN, {}).render(turns, end=end)


def test_tools_calls_and_results_are_in_the_form_that_is_parsed(template: ChatTemplate, tmp_path: Path) -> None:
    called = [{"id": name, "type": "function", "function": {"name": name, "arguments": {"a": 1}}} for name in "fg"]
    turns = [
        SYSTEM,
        USER,
        ChatTurn("assistant", "", {"tool_calls": called}),
        ChatTurn("tool", "1"),
        ChatTurn("tool", "2"),
    ]
    text = template.render(turns, tools=TOOLS)
    system, user, calls, results, last = (turn.split("<|im_end|>")[0] for turn in text.split("<|im_start|>")[1:])
    assert system.startswith("system\nBe brief.\n\n# Tools\n")
    assert '<tools>\n{"type": "function", "function": {"name": "f", "parameters": {}}}\n' in system
    assert (user, last) == ("user\nHi", "assistant\n")
    assert results == "user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    syntax = choose_calls("auto", read_template("smollm2", tmp_path))
    delta = AnswerSyntax(syntax).parser().feed(calls.removeprefix("assistant\n"))
    assert [(call.name, call.arguments) for call in delta.calls] == [("f", '{"a": 1}'), ("g", '{"a": 1}')]
    assert not delta.content.strip()
