"""Answers in the form of each model's chat template, from the request to the parsed parts.

The templates are reduced: they write the end of the prompt, the reasoning and the calls as the published template does,
and leave out the rest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router.api.openai.requests import parse_chat
from router.config import RouterConfig
from router.requests.answer_syntaxes import AnswerSyntaxes, wanted_format
from router.requests.request import ClientRequest, Conversation
from router.text.answer_syntax.formats import AnswerSyntax
from router.text.answer_text import AnswerText, TextJob
from router.text.chat_template import ChatTurn, PromptEnd
from router.text.tokenizer import Tokenizer
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.messages import FinishReason
from tandem.settings.model import ModelSettings
from tandem.tokenizers.grammar_process import GrammarKind
from tests.small_tokenizer import save_tokenizer

ON, OFF = True, False
ARGUMENTS = {
    "city": 'São "P", {x}:\n <b> \\ ]',
    "days": 3,
    "deep": {"a": [1, {"b": None}, [], ["q\"'"]], "t": True, "empty": {}},
    "code": "7",
    "sure": False,
    "note": None,
}
TYPES = {"city": "string", "days": "integer", "deep": "object", "code": "string", "sure": "boolean", "note": "null"}
SCHEMA = {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
]
CALLS = [
    {"id": f"functions.{name}:{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
    for number, (name, arguments) in enumerate((("f", ARGUMENTS), ("g", {})))
]


@dataclass(frozen=True)
class Model:
    """A model's template in parts: `m` is the assistant's message, `r` its reasoning, `on` if reasoning is on."""

    name: str
    calls: str
    """Writes the calls of `m`."""
    reasoning: str = ""
    """Writes the reasoning, or what the template writes if it is off."""
    prompt: str = ""
    """Writes the end of the prompt, after the header of the assistant's message."""
    special: tuple[str, ...] = ()
    """The markers that are special tokens of the model's tokenizer."""
    thinking: tuple[bool, ...] = (ON, OFF)
    """The modes that the model has."""
    ids: bool = False
    """True if the model writes the ids of its calls."""
    declares: str = ""
    """A text of the template's declaration of tools."""

    @property
    def template(self) -> str:
        return (
            "{% set on = enable_thinking | default(true) %}{% for m in messages %}{% if m.role == 'assistant' %}"
            "{% set r = m.reasoning_content | default('') %}<|assistant|>"
            f"{self.reasoning}{{{{ m.content }}}}{{% if m.tool_calls %}}{self.calls}{{% endif %}}<|end|>"
            "{% else %}{{ m.content }}{% endif %}{% endfor %}"
            f"{{% if add_generation_prompt %}}<|assistant|>{self.prompt}{{% endif %}}{{# {self.declares} #}}"
        )


def in_each_call(text: str, argument: str = "", end: str = "", between: str = "") -> str:
    """Returns a template that writes `text` for each call, with `argument` for each of its arguments, and `end`."""
    arguments = f"{{% for k, v in f.arguments | items %}}{argument}{{% endfor %}}" if argument else ""
    return (
        f"{{% for call in m.tool_calls %}}{{% set f = call.function %}}{text}{arguments}{end}"
        f"{{% if not loop.last %}}{{{{ {between!r} }}}}{{% endif %}}{{% endfor %}}"
    )


JSON = "{{ f.arguments | tojson }}"
VALUE = "{{ v if v is string else v | tojson }}"
AS_TEXT = "{{ v | tojson if v is mapping else v | string }}"
THINK = ("{{ '<think>\n' if on else '<think>\n\n</think>\n\n' }}", "<think>\n{{ r }}\n</think>{{ '\n\n' }}")
CODER = in_each_call(
    "<tool_call>\n<function={{ f.name }}>{{ '\n' }}",
    f"<parameter={{{{ k }}}}>{{{{ '\n' }}}}{AS_TEXT}{{{{ '\n' }}}}</parameter>{{{{ '\n' }}}}",
    "</function>\n</tool_call>",
    "\n",
)
D_BEGIN, D_END, D_CALL, D_CALL_END, D_SEP = (
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)
K_BEGIN, K_END, K_CALL, K_CALL_END, K_ARGUMENTS = (
    f"<|tool_{name}|>"
    for name in ("calls_section_begin", "calls_section_end", "call_begin", "call_end", "call_argument_begin")
)
KIMI = f"{K_BEGIN}{in_each_call(f'{K_CALL}{{{{ call.id }}}}{K_ARGUMENTS}{JSON}{K_CALL_END}')}{K_END}"
DSML = "｜DSML｜"
GEMMA_VALUE = (
    "{% macro value(v) %}{% if v is string %}{{ '<|\"|>' + v + '<|\"|>' }}{% elif v is boolean %}"
    "{{ 'true' if v else 'false' }}{% elif v is mapping %}{{ '{' }}{% for k, w in v | dictsort %}{{ k }}:{{ value(w) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}{% elif v is sequence %}{{ '[' }}{% for w in v %}"
    "{{ value(w) }}{% if not loop.last %},{% endif %}{% endfor %}{{ ']' }}{% else %}{{ v }}{% endif %}{% endmacro %}"
)
MODELS = (
    Model(
        "DeepSeek V3.1",
        D_BEGIN + in_each_call(f"{{{{ '{D_CALL}' + f.name + '{D_SEP}' + f.arguments + '{D_CALL_END}' }}}}") + D_END,
        "{% if on %}<think>{{ r }}{% endif %}</think>",
        "{{ '<think>' if on else '</think>' }}",
        (D_BEGIN, D_END, D_CALL, D_CALL_END, D_SEP),
    ),
    Model(
        "DeepSeek V3.2",
        f"{{{{ '\n\n' }}}}<{DSML}function_calls>{{{{ '\n' }}}}"
        + in_each_call(
            f'<{DSML}invoke name="{{{{ f.name }}}}">{{{{ \'\n\' }}}}',
            f'<{DSML}parameter name="{{{{ k }}}}" string="{{{{ \'true\' if v is string else \'false\' }}}}">{VALUE}'
            f"</{DSML}parameter>{{{{ '\n' }}}}",
            f"</{DSML}invoke>{{{{ '\n' }}}}",
        )
        + f"</{DSML}function_calls>",
        "{% if on %}<think>{{ r }}{% endif %}</think>",
        "{{ '<think>' if on else '</think>' }}",
    ),
    Model("Kimi K2", KIMI, "", "", (K_BEGIN, K_END, K_CALL, K_CALL_END, K_ARGUMENTS), (OFF,), ids=True,
          declares="<|im_system|>tool_declare<|im_middle|>"),
    Model("Kimi K2 Thinking", KIMI, "<think>{{ r }}</think>", "", (K_BEGIN, K_END, K_CALL, K_CALL_END, K_ARGUMENTS),
          (ON,), ids=True, declares="<|im_system|>tool_declare<|im_middle|>"),
    Model(
        "GLM-4.7",
        in_each_call(
            "<tool_call>{{ f.name }}", f"<arg_key>{{{{ k }}}}</arg_key><arg_value>{VALUE}</arg_value>", "</tool_call>"
        ),
        "{% if on %}<think>{{ r }}{% endif %}</think>",
        "{{ '<think>' if on else '</think>' }}",
    ),
    Model(
        "MiniMax-M2",
        "{{ '\n' }}<minimax:tool_call>{{ '\n' }}"
        + in_each_call(
            "<invoke name=\"{{ f.name }}\">{{ '\n' }}",
            f'<parameter name="{{{{ k }}}}">{VALUE}</parameter>{{{{ \'\n\' }}}}',
            "</invoke>{{ '\n' }}",
        )
        + "</minimax:tool_call>",
        THINK[1],
        "<think>{{ '\n' }}",
        thinking=(ON,),
    ),
    Model("Qwen3.5", "{{ '\n\n' }}" + CODER, THINK[1], THINK[0]),
    Model(
        "Gemma 4",
        GEMMA_VALUE
        + in_each_call("<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>"),
        "<|channel>thought{{ '\n' }}{% if on %}{{ r + '\n' }}{% endif %}<channel|>",
        "{% if not on %}<|channel>thought{{ '\n' }}<channel|>{% endif %}",
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    Model(
        "Ministral 3",
        in_each_call(f"[TOOL_CALLS]{{{{ f.name }}}}[ARGS]{JSON}"),
        "{% if on %}[THINK]{{ r }}[/THINK]{% endif %}",
        special=("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    ),
    Model(
        "Nemotron 3",
        "{{ '\n' }}" + CODER,
        "{{ '<think>\n' + r + '\n</think>\n' if on else '<think></think>' }}",
        "{{ '<think>\n' if on else '<think></think>' }}",
    ),
)  # fmt: skip
EACH_MODEL = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)


def served(model: Model, folder: Path) -> tuple[Tokenizer, AnswerSyntaxes]:
    """Returns a tokenizer with the model's template and special tokens, and the parsers that the template chooses."""
    save_tokenizer(folder, special=("<|assistant|>", "<|end|>", *model.special))
    tokenizer = Tokenizer(folder, model.template)
    return tokenizer, AnswerSyntaxes(RouterConfig("r", ModelSettings(folder, ("m",)), ""), tokenizer)


def request(**fields: Any) -> ClientRequest:
    body = {"messages": [{"role": "user", "content": "Hello"}], **fields}
    return parse_chat(json.dumps(body).encode(), EventTime.now(LifecycleEvent.RECEIVED), strict=True).request


def prompt_of(asked: ClientRequest) -> Conversation:
    assert isinstance(asked.prompt, Conversation)
    return asked.prompt


def parsed(syntax: AnswerSyntax, *pieces: str) -> tuple[str, str, list[list[str]]]:
    """Returns the content, the reasoning, and the id, name and arguments of each call, without white space around."""
    parser = syntax.parser()
    content, thought, calls = "", "", list[list[str]]()
    for delta in [*map(parser.feed, pieces), parser.finish()]:
        content += delta.content
        thought += delta.reasoning
        for call in delta.calls:
            if call.index == len(calls):
                calls.append([call.call_id, call.name, ""])
            calls[call.index][2] += call.arguments
    return content.strip(), thought.strip(), calls


@pytest.mark.parametrize(
    ("model", "thinking"),
    [pytest.param(model, on, id=f"{model.name}-{on}") for model in MODELS for on in model.thinking],
)
def test_an_answer_of_the_template_is_parsed(model: Model, thinking: bool, tmp_path: Path) -> None:
    tokenizer, syntaxes = served(model, tmp_path)
    asked = request(tools=TOOLS, chat_template_kwargs={"enable_thinking": thinking})
    variables = {"enable_thinking": thinking}
    prompt = tokenizer.render_chat(prompt_of(asked).turns, variables, TOOLS)
    syntax = syntaxes.of(asked, tuple(tokenizer.encode_rendered(prompt)))
    assert syntax is not None
    said = ChatTurn("assistant", "Look.", {"tool_calls": CALLS, **({"reasoning_content": "Hm."} if thinking else {})})
    whole = tokenizer.render_chat([*prompt_of(asked).turns, said], variables, TOOLS, PromptEnd.LAST_TURN)
    assert whole.startswith(prompt)
    job = TextJob(tokenizer.encode(whole.removeprefix(prompt), add_special_tokens=False), finish=FinishReason.STOP)
    AnswerText(tokenizer, [], kept=syntax.kept).run(job)
    content, thought, calls = parsed(syntax, job.text)
    assert (content, thought) == ("Look.", "Hm." if thinking else "")
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == [("f", ARGUMENTS), ("g", {})]
    assert not model.ids or [call_id for call_id, _, _ in calls] == [call["id"] for call in CALLS]
    for at in range(1, len(job.text)):
        again = parsed(syntax, job.text[:at], job.text[at:])
        assert (*again[:2], [call[1:] for call in again[2]]) == (content, thought, [call[1:] for call in calls])


@EACH_MODEL
def test_a_forced_call_and_an_answer_with_a_format_have_the_form_of_their_grammar(model: Model, tmp_path: Path) -> None:
    """Their grammars are the same for all models, and begin with the first token: there is no reasoning."""
    tokenizer, syntaxes = served(model, tmp_path)
    forced, formatted = (
        request(**fields) for fields in ({"tools": TOOLS, "tool_choice": "required"},
                                         {"response_format": {"type": "json_object"}})
    )  # fmt: skip
    ids = tuple(tokenizer.encode_rendered(tokenizer.render_chat(prompt_of(forced).turns, {}, TOOLS)))
    syntaxes.check(forced)
    wanted, syntax = wanted_format(forced), syntaxes.of(forced, ids)
    assert wanted is not None
    assert wanted.kind is GrammarKind.TOOL_CALL
    assert syntax is not None
    ((_, name, arguments),) = parsed(syntax, '{"name": "f", "parameters": {"days": 3}}')[2]
    assert (name, json.loads(arguments)) == ("f", {"days": 3})
    assert syntaxes.of(formatted, ids) is None
