"""The bodies of /v1/chat/completions, /v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from router.api.bodies.body import Body
from router.api.completions.fields import PROMPTS_MAX
from router.api.openai.models.fields import (
    Biases,
    Count,
    Frequency,
    JsonSchema,
    LastTokens,
    Logprobs,
    MinP,
    Natural,
    Presence,
    Priority,
    Repetition,
    Salt,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from router.api.openai.models.messages import Message, NamedTool, ResponseFormat, StreamOptions, StructuredOutputs, Tool
from router.api.unserved_fields import CHAT_UNSERVED, COMPLETION_UNSERVED, INERT, Unserved
from router.requests.validation import INT32_MAX


def _others(refused: dict[str, Unserved]) -> dict[str, Any]:
    """Return the extension of a schema that names the fields outside it."""
    return {"x-refused": {name: rule.reason for name, rule in refused.items()}, "x-without-effect": sorted(INERT)}


class Encoding(Body):
    """The fields of how a prompt becomes token ids."""

    model: str | None = Field(None, description="The name in /v1/models; the served one if it is left out.")
    add_special_tokens: bool | None = Field(
        None,
        description="Adds the special tokens of the tokenizer to the prompt: true if left out, but false for messages.",
    )
    truncate_prompt_tokens: LastTokens | None = Field(
        None, description="Keeps so many of the prompt's last tokens; -1: as many as the context leaves."
    )


class ChatEncoding(Encoding):
    """The fields of how a conversation becomes a prompt."""

    messages: Annotated[list[Message], Field(min_length=1)]
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the model's chat template.")
    reasoning_effort: str | None = Field(None, description="A variable for the model's chat template.")
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call is returned.")
    add_generation_prompt: bool | None = Field(
        None, description="True, unless continue_final_message is: the prompt ends where the next answer begins."
    )
    continue_final_message: bool | None = Field(None, description="The answer continues the last message.")


class Generation(Body):
    """The options of the answer."""

    max_tokens: Count | None = Field(None, description="If it is left out, the rest of the context.")
    max_completion_tokens: Count | None = Field(
        None, description="OpenAI's newer name of max_tokens, which it goes before."
    )
    min_tokens: Natural | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = Field(None, description="0 and -1: any token.")
    top_p: TopP | None = None
    min_p: MinP | None = None
    frequency_penalty: Frequency | None = None
    presence_penalty: Presence | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: Biases | None = Field(None, description="Numbers to add to the logits of tokens, by token id.")
    prompt_logprobs: Logprobs | None = Field(
        None, description="The number of alternatives to report with each token of the prompt. Not with stream."
    )
    seed: Seed | None = Field(None, description="-1: a random one.")
    n: Annotated[int, Field(ge=1)] | None = Field(None, description="The number of answers.")
    stop: str | list[Annotated[str, Field(min_length=1)]] | None = None
    stop_token_ids: list[Natural] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    speculate: bool | None = Field(None, description="False: no speculative decoding. The tokens are the same.")
    priority: Priority | None = Field(None, description="Lower values are served first.")
    slo_class: str | None = Field(None, description="The service class, by name.")
    cache_salt: Salt | None = Field(None, description="Cached KV is reused only between requests of the same salt.")
    return_token_ids: bool | None = Field(None, description="The reply has the token ids of prompt and answers.")
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: JsonSchema | None = None
    regex: str | None = None
    ebnf: str | None = None


class ChatCompletionRequest(ChatEncoding, Generation):
    """The body of /v1/chat/completions."""

    model_config = ConfigDict(json_schema_extra=_others(dict(CHAT_UNSERVED)))

    logprobs: bool | None = None
    top_logprobs: Logprobs | None = Field(None, description="Only with logprobs.")


Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Natural], Field(min_length=1)]


class CompletionRequest(Encoding, Generation):
    """The body of /v1/completions."""

    model_config = ConfigDict(json_schema_extra=_others(dict(COMPLETION_UNSERVED)))

    prompt: Text | TokenIds | Annotated[list[Text | TokenIds], Field(min_length=1, max_length=PROMPTS_MAX)] = Field(
        description="A prompt, or several, whose choices follow one another."
    )
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = Field(
        None, description="If it is left out, the rest of the context. 0 only with echo: the reply is the prompt alone."
    )
    echo: bool | None = Field(
        None, description="True: the text begins with the prompt, and logprobs with those of its tokens."
    )
    best_of: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The number of answers, of which the n most likely are returned. Not with stream."
    )
    logprobs: Logprobs | None = None


class TokenizeTextRequest(Encoding):
    """The body of /tokenize for a text."""

    prompt: Annotated[str, Field(min_length=1)]
    return_token_strs: bool | None = Field(None, description="The reply has the tokens' spellings, too.")


class TokenizeChatRequest(ChatEncoding):
    """The body of /tokenize for a conversation."""

    prompt: None = None
    return_token_strs: bool | None = Field(None, description="The reply has the tokens' spellings, too.")


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Natural], Field(min_length=1)]
