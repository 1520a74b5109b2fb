"""Parses the requests of `tandem.v1.Inference` into `ClientRequest`s."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from router.api.body import UnknownFields, read_object
from router.api.openai.messages import AssistantMessage, Tools
from router.api.openai.prompts import check_answers, check_prompts
from router.api.openai.requests import prompt_end
from router.api.openai.tools import tool_calls, tool_options
from router.api.prompt_replies import PromptForm
from router.config import RouterConfig
from router.requests.answer_format import AnswerFormat
from router.requests.request import ClientRequest, Conversation, Options, Prompt
from router.requests.validation import RequestValidator
from router.text.chat_template import ChatTurn
from router.text.request_items import check_json_items, check_template_kwargs_size
from router.text.request_reader import check_message_count
from router.text.tools import ToolOptions
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.generated.tandem.v1 import inference_pb2
from tandem.protocol.lifecycle.events import EventTime
from tandem.tokenizers.grammar_process import GrammarKind

_NO_OTHERS = UnknownFields(strict=True)
_SCHEMA_ITEMS_MAX = 1 << 18
"""Maximum number of JSON items in the parameters of all tools of a request together.

The limit of each tool is this number divided by the number of tools.
"""


def conversation(request: inference_pb2.ChatRequest, variables: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a Chat request; its answers are split into reasoning, content and tool calls.

    `variables` are the variables of the chat template. Raises InvalidArgument for a wrong field.
    """
    turns = tuple(_turn(message, f"messages[{number}]") for number, message in enumerate(request.messages))
    next_turn = request.add_generation_prompt if request.HasField("add_generation_prompt") else None
    end = prompt_end(next_turn, continued=request.continue_final_message)
    return Conversation(turns, variables, _tools(request), end, parsed=True)


def _turn(message: inference_pb2.ChatMessage, path: str) -> ChatTurn:
    extras: dict[str, Any] = {}
    if message.role == "assistant":
        extras = {"tool_calls": _calls(message, path), "reasoning_content": message.reasoning_content}
    elif message.role == "tool":
        if not message.tool_call_id:
            raise InvalidArgument(f"{path}.tool_call_id", "is missing; name the call that this message answers")
        extras = {"tool_call_id": message.tool_call_id, "name": message.name}
    role = "system" if message.role == "developer" else message.role
    return ChatTurn(role, message.content, {name: value for name, value in extras.items() if value})


def _calls(message: inference_pb2.ChatMessage, path: str) -> list[dict[str, Any]]:
    if not message.tool_calls:
        return []
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    try:
        body = read_object(AssistantMessage, {"role": "assistant", "tool_calls": calls}, _NO_OTHERS, f"{path}.")
        return tool_calls(body.tool_calls or (), path)
    except InvalidArgument as error:
        raise _renamed(error) from error


def _tools(request: inference_pb2.ChatRequest) -> ToolOptions:
    if not request.tools and not request.tool_choice and not request.tool_function:
        return ToolOptions()
    choice: Any = request.tool_choice or None
    if request.tool_function:
        if choice:
            raise InvalidArgument("tool_function", "takes the place of tool_choice; send one of them")
        choice = {"type": "function", "function": {"name": request.tool_function}}
    parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None
    tools = [_tool(tool, number, len(request.tools)) for number, tool in enumerate(request.tools)]
    try:
        fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
        return tool_options(read_object(Tools, fields, _NO_OTHERS))
    except InvalidArgument as error:
        raise _renamed(error) from error


def _tool(tool: inference_pb2.Tool, number: int, count: int) -> dict[str, Any]:
    parameters = None
    if tool.parameters:
        field = f"tools[{number}].parameters"
        try:
            check_json_items(tool.parameters.encode(), _SCHEMA_ITEMS_MAX // count)
            parameters = json.loads(tool.parameters)
        except InvalidArgument as error:
            raise InvalidArgument(field, error.problem) from error
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(field, f"is not valid JSON ({error})") from error
        if not isinstance(parameters, dict):
            raise InvalidArgument(field, "must be a JSON schema, an object")
    function = {"name": tool.name, "description": tool.description or None, "parameters": parameters}
    return {"type": "function", "function": function}


def _renamed(error: InvalidArgument) -> InvalidArgument:
    """Return the error with the field's name in the proto schema instead of its name in OpenAI's API."""
    field = error.field.replace(".function", "")
    return InvalidArgument("tool_function" if field == "tool_choice.name" else field, error.problem)


def generation_options(message: inference_pb2.GenerationOptions) -> Options:
    """Return the options of a message, not validated. Raises InvalidArgument for an answer format without content."""

    def given(name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    return Options(
        max_tokens=given("max_tokens"),
        temperature=given("temperature"),
        top_k=given("top_k"),
        top_p=given("top_p"),
        min_p=given("min_p"),
        seed=given("seed"),
        n=given("n"),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        min_tokens=message.min_tokens,
        include_stop=message.include_stop_str_in_output,
        speculate=message.speculate if message.HasField("speculate") else True,
        ignore_eos=message.ignore_eos,
        frequency_penalty=given("frequency_penalty"),
        presence_penalty=given("presence_penalty"),
        repetition_penalty=given("repetition_penalty"),
        logprobs=given("logprobs"),
        prompt_logprobs=given("prompt_logprobs"),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        add_special_tokens=given("add_special_tokens"),
        truncate_prompt_tokens=given("truncate_prompt_tokens"),
        priority=message.priority,
        slo_class=message.slo_class,
        cache_salt=message.cache_salt,
        session=message.session_id,
        cache_retention_s=message.cache_retention_s,
        answer_format=_answer_format(message.response_format) if message.HasField("response_format") else None,
    )


def _answer_format(message: inference_pb2.ResponseFormat) -> AnswerFormat:
    kind = message.WhichOneof("format")
    if kind is None:
        raise InvalidArgument("response_format", "has no format; leave it out for any text")
    value = tuple(message.choice.texts) if kind == GrammarKind.CHOICE else getattr(message, kind)
    return AnswerFormat(f"response_format.{kind}", GrammarKind(kind), value)


@dataclass(frozen=True, slots=True)
class CallFacts:
    """The properties of a call that are not in its message: time of arrival, tenant and traceparent."""

    received: EventTime
    tenant: str
    traceparent: str


@dataclass(frozen=True, slots=True)
class InferenceCall:
    """A parsed call of Generate or Chat. An immutable value."""

    requests: tuple[ClientRequest, ...]
    """One request per prompt, at least one; the requests differ only in their prompts."""
    prompts: PromptForm
    return_token_ids: bool
    """True if the response has the token ids of the prompts."""

    @property
    def options(self) -> Options:
        """The options, which are the same for all prompts."""
        return self.requests[0].options

    @property
    def describes_prompts(self) -> bool:
        """True if the response has a message about each prompt: its text, scores or token ids."""
        return self.prompts.needed or self.return_token_ids


@dataclass(frozen=True, slots=True)
class CallParser:
    """Parses the messages of calls into requests. Each InvalidArgument names the message's field.

    The servicer owns it; large messages are parsed in a tokenizer thread.
    """

    config: RouterConfig
    validator: RequestValidator

    def generate(self, facts: CallFacts, message: inference_pb2.GenerateRequest) -> InferenceCall:
        """Parse a Generate message. Raises InvalidArgument for an invalid field."""
        prompts = self._prompts(message)
        best_of = message.best_of if message.HasField("best_of") else None
        call = _call(facts, message, prompts, echo=message.echo, best_of=best_of)
        check_answers(len(prompts), call.options.answers)
        return call

    def chat(self, facts: CallFacts, message: inference_pb2.ChatRequest) -> InferenceCall:
        """Parse a Chat message. Raises InvalidArgument for an invalid field."""
        check_message_count(len(message.messages), self.config.max_messages)
        turns = conversation(message, self._variables(message.chat_template_kwargs))
        return _call(facts, message, [turns])

    def tokenize(self, facts: CallFacts, message: inference_pb2.TokenizeRequest) -> tuple[ClientRequest, bool]:
        """Return the request whose prompt is to be tokenized, and True if the reply has the text of each token."""
        kind = message.WhichOneof("request")
        if kind is None:
            raise InvalidArgument("request", "is missing; send generate or chat")
        if kind == "generate" and message.generate.WhichOneof("prompt") in ("token_ids", "prompts"):
            raise InvalidArgument("generate", "must have one text as its prompt")
        call = self.chat(facts, message.chat) if kind == "chat" else self.generate(facts, message.generate)
        return call.requests[0], message.return_token_strs

    def _prompts(self, message: inference_pb2.GenerateRequest) -> Sequence[Prompt]:
        if message.WhichOneof("prompt") != "prompts":
            return [self._prompt(message)]
        check_prompts(len(message.prompts.prompts))
        return [self._prompt(prompt) for prompt in message.prompts.prompts]

    def _prompt(self, message: inference_pb2.GenerateRequest | inference_pb2.Prompt) -> Prompt:
        if message.WhichOneof("prompt") != "token_ids":
            return message.text
        self.validator.check_token_count(len(message.token_ids.ids))
        return tuple(message.token_ids.ids)

    def _variables(self, text: str) -> dict[str, Any]:
        """Return the variables of the chat template; their size is checked before the JSON is parsed."""
        check_template_kwargs_size(len(text.encode()), self.config.max_template_kwargs_bytes)
        try:
            value = json.loads(text or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidArgument("chat_template_kwargs", f"is not valid JSON ({error})") from error
        if not isinstance(value, dict):
            raise InvalidArgument("chat_template_kwargs", "must be a JSON object")
        return value


def _call(
    facts: CallFacts,
    message: inference_pb2.GenerateRequest | inference_pb2.ChatRequest,
    prompts: Sequence[Prompt],
    *,
    echo: bool = False,
    best_of: int | None = None,
) -> InferenceCall:
    given = generation_options(message.options)
    form = PromptForm.of(given, echo=echo)
    options = replace(form.options(given), best_of=None if best_of == (given.n or 1) else best_of)
    requests = tuple(
        ClientRequest(
            message.request_id, message.model, prompt, options, facts.received, facts.tenant, facts.traceparent
        )
        for prompt in prompts
    )
    return InferenceCall(requests, form, message.options.return_token_ids)
