"""The bodies of /v1/chat/completions, /v1/completions, /tokenize and /detokenize.

Fields have the same meaning as in OpenAI's API reference, and vLLM's extensions the same as in vLLM; `slo_class` and
`speculate` are Tandem's own. Fields that the server does not implement are in `router/api/unserved_fields.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, Tag

from router.api.body import ITEMS, LIST, Body, Strings, Text, choice, text_or_items
from router.api.cache_hints import PromptCaching
from router.api.fields import Count, Logprobs, Name, Sampling, TemplateVariables, TokenIds, bounded
from router.api.openai.formats import Formats
from router.api.openai.messages import Message, Tools
from router.api.openai.prompts import Prompts
from router.api.unserved_fields import CHAT_UNSERVED, COMPLETION_UNSERVED, INERT, Unserved
from tandem.protocol.messages import INT32_MAX, LOGIT_BIAS_MAX, LOGIT_BIASES_MAX


def _others(refused: Mapping[str, Unserved]) -> dict[str, Any]:
    """Return a schema extension that lists the rejected fields and the fields without effect."""
    return {"x-refused": {name: rule.reason for name, rule in refused.items()}, "x-without-effect": sorted(INERT)}


class Encoding(Body):
    """The fields that control how a prompt becomes token ids."""

    inert = INERT
    model: str | None = Field(None, description="The name in /v1/models; the served one if it is left out.")
    add_special_tokens: bool | None = Field(
        None,
        description="Adds the special tokens of the tokenizer to the prompt: true if left out, but false for messages.",
    )
    truncate_prompt_tokens: Annotated[int, bounded(-1, INT32_MAX, **{"not": {"const": 0}})] | None = Field(
        None, description="The number of the prompt's last tokens to keep; -1: as many as the context leaves."
    )


class ChatEncoding(Encoding, Tools):
    """The fields that control how a conversation becomes a prompt."""

    messages: Annotated[list[Message], LIST, bounded(minItems=1)]
    chat_template_kwargs: TemplateVariables | None = None
    reasoning_effort: str | None = Field(None, description="A variable for the model's chat template.")
    add_generation_prompt: bool | None = Field(
        None, description="True, unless continue_final_message is: the prompt ends where the next answer begins."
    )
    continue_final_message: bool | None = Field(None, description="The answer continues the last message.")


class StreamOptions(Body):
    """The options that add contents to a stream's events."""

    inert = frozenset({"include_obfuscation"})
    include_usage: bool | None = Field(None, description="An event after the answer has its usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="Every event has the usage so far, too; only with include_usage."
    )


class Generation(Sampling, PromptCaching, Formats):
    """The options of the answers."""

    max_tokens: Count | None = Field(None, description="If it is left out, the rest of the context.")
    max_completion_tokens: Count | None = Field(
        None, description="OpenAI's newer name of max_tokens, which it goes before."
    )
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, bounded(-LOGIT_BIAS_MAX, LOGIT_BIAS_MAX)]],
            bounded(maxProperties=LOGIT_BIASES_MAX, propertyNames={"pattern": "^[0-9]{1,10}$"}),
        ]
        | None
    ) = Field(None, description="Numbers to add to the logits of tokens, by token id.")
    prompt_logprobs: Logprobs | None = Field(
        None, description="The number of alternatives to report with each token of the prompt. Not with stream."
    )
    n: Annotated[int, bounded(1)] | None = Field(None, description="The number of answers.")
    stop: (
        Annotated[
            Text | Annotated[Strings, bounded(items={"type": "string", "minLength": 1}), Tag(ITEMS)],
            choice(text_or_items, "must be a string or a list of strings"),
        ]
        | None
    ) = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = Field(None, description="The reply has the token ids of prompt and answers.")
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")


class ChatCompletionRequest(ChatEncoding, Generation):
    """The body of /v1/chat/completions."""

    model_config = ConfigDict(json_schema_extra=_others(CHAT_UNSERVED))
    refused: ClassVar[Mapping[str, Unserved]] = CHAT_UNSERVED
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = Field(None, description="Only with logprobs.")


class CompletionRequest(Encoding, Generation):
    """The body of /v1/completions."""

    model_config = ConfigDict(json_schema_extra=_others(COMPLETION_UNSERVED))
    refused: ClassVar[Mapping[str, Unserved]] = COMPLETION_UNSERVED
    prompt: Prompts = Field(description="A prompt, or several, whose choices follow one another.")
    max_tokens: Annotated[int, bounded(0, INT32_MAX)] | None = Field(
        None, description="If it is left out, the rest of the context. 0 only with echo: the reply is the prompt alone."
    )
    echo: bool | None = Field(
        None, description="True: the text begins with the prompt, and logprobs with those of its tokens."
    )
    best_of: Annotated[int, bounded(1)] | None = Field(
        None, description="The number of answers, of which the n most likely are returned. Not with stream."
    )
    logprobs: Logprobs | None = None


class TokenizeTextRequest(Encoding):
    """The body of /tokenize for a text."""

    prompt: Name
    return_token_strs: bool | None = Field(None, description="The reply has the tokens' spellings, too.")


class TokenizeChatRequest(ChatEncoding):
    """The body of /tokenize for a conversation."""

    refused: ClassVar[Mapping[str, Unserved]] = CHAT_UNSERVED
    prompt: None = None
    return_token_strs: bool | None = Field(None, description="The reply has the tokens' spellings, too.")


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[TokenIds, Field(min_length=1)]
