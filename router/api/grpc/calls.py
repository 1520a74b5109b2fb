"""Parses the requests of `tandem.v1.Inference` into `ClientRequest`s."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from router.api.completions.fields import check_answers, check_prompts
from router.api.completions.prompt_replies import PromptForm
from router.api.grpc.conversation import conversation
from router.api.grpc.options import generation_options
from router.config import RouterConfig
from router.requests.request import ClientRequest, Options, Prompt
from router.requests.validation import RequestValidator
from router.text.request_items import check_template_kwargs_size
from router.text.request_reader import check_message_count
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.generated.tandem.v1 import inference_pb2
from tandem.protocol.lifecycle.timeline import EdgeStamp


@dataclass(frozen=True, slots=True)
class CallFacts:
    """The facts about a call that its message does not have."""

    received: EdgeStamp
    tenant: str
    traceparent: str


@dataclass(frozen=True, slots=True)
class InferenceCall:
    """A parsed call of Generate or Chat."""

    requests: tuple[ClientRequest, ...]
    """One for each prompt, at least one; they differ in their prompts alone."""
    prompts: PromptForm
    return_token_ids: bool
    """True if the response has the token ids of the prompts."""

    @property
    def options(self) -> Options:
        """The options of all prompts."""
        return self.requests[0].options

    @property
    def describes_prompts(self) -> bool:
        """True if the response has anything about its prompts."""
        return self.prompts.needed or self.return_token_ids


@dataclass(frozen=True, slots=True)
class CallParser:
    """Parses messages; each error names the field of the message."""

    config: RouterConfig
    validator: RequestValidator

    def generate(self, facts: CallFacts, message: inference_pb2.GenerateRequest) -> InferenceCall:
        """Return the call of Generate."""
        prompts = self._prompts(message)
        best_of = message.best_of if message.HasField("best_of") else None
        call = _call(facts, message, prompts, echo=message.echo, best_of=best_of)
        check_answers(len(prompts), call.options.answers)
        return call

    def chat(self, facts: CallFacts, message: inference_pb2.ChatRequest) -> InferenceCall:
        """Return the call of Chat."""
        check_message_count(len(message.messages), self.config.max_messages)
        turns = conversation(message, self._variables(message.chat_template_kwargs))
        return _call(facts, message, [turns])

    def tokenize(self, facts: CallFacts, message: inference_pb2.TokenizeRequest) -> tuple[ClientRequest, bool]:
        """Return the request whose prompt is tokenized, and whether its tokens are spelled."""
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
        return [self._prompt(each) for each in message.prompts.prompts]

    def _prompt(self, message: inference_pb2.GenerateRequest | inference_pb2.Prompt) -> Prompt:
        if message.WhichOneof("prompt") != "token_ids":
            return message.text
        self.validator.check_token_count(len(message.token_ids.ids))
        return tuple(message.token_ids.ids)

    def _variables(self, text: str) -> dict[str, Any]:
        """Reads the variables of the chat template; their size is checked before they are read."""
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
