"""A model's chat template: sandboxed Jinja with the functions and filters that Hugging Face templates expect.

A template is a program whose input comes from clients, so the time and the size of each rendering are limited.
"""

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from threading import local
from types import MappingProxyType
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from tandem.protocol.errors import InvalidArgument, ModelError

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
_GIVEN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
"""Template variables that clients cannot set: the server sets them, or they are function arguments in transformers."""
_RENDER_CPU_S = 2.0
"""Maximum CPU time of one rendering, in seconds; CPU time does not depend on how busy the host is.

Rendering the largest allowed request takes a tenth of this time. A template with nested loops over thousands of
messages may take longer.
"""
_RENDERED_CHARS_MAX = 64 << 20
"""Maximum number of characters of a rendered conversation: sixteen times the default limit of a request."""


class PromptEnd(Enum):
    """The place at which the prompt of a conversation ends."""

    NEXT_TURN = "add_generation_prompt"
    """After the beginning of a new assistant message, so that the model answers."""
    LAST_TURN = ""
    """After the last message."""
    WITHIN_LAST_TURN = "continue_final_message"
    """After the content of the last message, so that the model continues that content."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a conversation; `role` is system, user, assistant or tool."""

    role: str
    content: str
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields for the template, as JSON: tool_calls, tool_call_id, name, reasoning_content."""
    chars: int = field(init=False, default=0)
    """The approximate size in characters; computed while the body is parsed (large bodies: in a thread)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "chars", len(self.content) + (len(str(self.extras)) if self.extras else 0))


class ChatTemplate:
    """Renders conversations to prompt text. The tokenizer owns it; several threads may call it at once."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _DeadlineEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Deadline, _Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template does not compile ({error}); replace the template") from error
        self._special_tokens = dict(special_tokens)
        self._given = _GIVEN | self._special_tokens.keys() | environment.globals.keys()

    def render(
        self,
        turns: Sequence[ChatTurn],
        variables: Mapping[str, Any] = NO_VARIABLES,
        tools: Sequence[Mapping[str, Any]] = (),
        end: PromptEnd = PromptEnd.NEXT_TURN,
    ) -> str:
        """Return the prompt of a conversation, which ends at `end`; `tools` are the tools that the model may call.

        Raises InvalidArgument if the template rejects `turns`, takes too long or produces too much text for them, or if
        `variables` has a variable that the server sets.
        """
        if taken := next((name for name in variables if name in self._given), None):
            raise InvalidArgument(
                f"chat_template_kwargs.{taken}", "is given to the template by the server; leave it out"
            )
        if end is PromptEnd.WITHIN_LAST_TURN:
            return self._continued(turns, variables, tools)
        given = {
            "messages": [{"role": turn.role, "content": turn.content, **turn.extras} for turn in turns],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": end is PromptEnd.NEXT_TURN,
            **self._special_tokens,
        }
        _deadline.cpu_s = time.thread_time() + _RENDER_CPU_S
        try:
            return _joined(self._template.generate({**variables, **given}))
        except _TooMuch as error:
            raise InvalidArgument("messages", f"{error.args[0]}; send fewer or shorter ones") from None
        except Exception as error:  # a template is a program and may raise anything
            raise InvalidArgument("messages", f"the model's chat template refuses them: {error}") from error

    def _continued(
        self, turns: Sequence[ChatTurn], variables: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
    ) -> str:
        """Return the prompt that ends after the content of the last turn.

        To find that place in the rendered text, a mark is appended to the content: random digits, then a space. As in
        transformers, if the template removes the space, white space at the end of the content is removed as well.
        """
        mark = f"{secrets.randbelow(10**20):020d}"
        last = replace(turns[-1], content=f"{turns[-1].content}{mark} ")
        text = self.render([*turns[:-1], last], variables, tools, PromptEnd.LAST_TURN)
        before, separator, after = text.rpartition(mark)
        if not separator:
            message = "the model's chat template leaves out the content of the last message, so it cannot be continued"
            raise InvalidArgument("continue_final_message", message)
        before = before.replace(f"{mark} ", "").replace(mark, "")  # a template may repeat the content
        return before if after.startswith(" ") else before.rstrip()


class _TooMuch(BaseException):
    """Raised if a rendering exceeds a limit; not an `Exception`, so that no filter of a template catches it."""


_deadline = local()
"""Each thread's deadline: `cpu_s` is the CPU time of the thread, in seconds, at which its rendering is stopped."""


def _joined(pieces: Iterable[str]) -> str:
    kept, chars = list[str](), 0
    for piece in pieces:
        chars += len(piece)
        if chars > _RENDERED_CHARS_MAX:
            raise _TooMuch(f"make more than {_RENDERED_CHARS_MAX} characters in the model's chat template")
        kept.append(piece)
    return "".join(kept)


class _DeadlineEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A Jinja environment that checks the deadline in each loop iteration and macro call; nothing else takes long.

    A mapping that a template appends to a text becomes JSON: the templates of DeepSeek V3.1 append the arguments of an
    earlier call, which they expect as text, whereas most templates need them parsed.
    """

    intercepted_binops = frozenset({"+"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        appended = isinstance(left, str) and isinstance(right, Mapping)
        return super().call_binop(context, operator, left, _tojson(right) if appended else right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = super()._parse(source, name, filename)
        for node in template.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)):
            check = jinja2.nodes.ExtensionAttribute(_Deadline.identifier, _Deadline.check.__name__)
            call = jinja2.nodes.Call(check, [], [], None, None)
            cast("jinja2.nodes.For", node).body.insert(0, jinja2.nodes.ExprStmt(call, lineno=node.lineno))
        return template


class _Deadline(jinja2.ext.Extension):
    """Makes the deadline check callable from compiled templates, but not accessible to template code by name."""

    @staticmethod
    def check() -> None:
        """Raise _TooMuch once the deadline has passed."""
        if time.thread_time() > _deadline.cpu_s:
            raise _TooMuch(f"took the model's chat template more than {_RENDER_CPU_S:g} s")


class _Generation(jinja2.ext.Extension):
    """The `{% generation %}` block, which marks the assistant's text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, on which models were not trained.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
