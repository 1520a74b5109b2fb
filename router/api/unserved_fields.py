"""The fields of OpenAI's API, and of vLLM's and SGLang's extensions, that this server does not implement.

A field that would change the answer is rejected by name with a reason, unless its value equals the default behavior
(`UNSERVED`). A field without effect is accepted silently (`INERT`). Every other field is ignored, with a log line and a
response header, or rejected if `RouterConfig.strict_requests` is set.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

IGNORED_HEADER = "x-tandem-ignored"
"""The response header with the names of the ignored fields, separated by commas."""
_LOGGED_MAX = 256
"""Maximum number of ignored field names that one router logs, because clients can choose any number of names."""


@dataclass(frozen=True, slots=True)
class Unserved:
    """The reason why a field is rejected, and the values that are accepted because they mean the default behavior."""

    reason: str
    neutral: tuple[Any, ...] = ()
    empty: bool = True
    """True if "", [], {} and false are accepted in addition to `neutral`: they too mean the default behavior."""

    def asks_nothing(self, value: Any) -> bool:
        """Return True if `value` means the default behavior: the answer is the same as without the field."""
        if self.empty and value in ("", [], {}, False) and not _is_number(value):
            return True
        # 1 == True in Python, so booleans are compared with booleans only.
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.neutral)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_FUNCTIONS = "it is outdated; send tools, tool_choice and tool_calls"
_COMPLETION_TOOLS = "tools are for chat completions"
_COMPLETION_CHAT = "chat templates are for chat completions"
_GRAMMAR = "structural tags are not served; ask by response_format or structured_outputs"
_CHOICE = "this sampling option is not supported"
_ADAPTER = "an adapter is requested by its name as model"
_DETOKENIZING = "special tokens are always left out of the text"

UNSERVED: Mapping[str, Unserved] = {
    "functions": Unserved(_FUNCTIONS),
    "function_call": Unserved(_FUNCTIONS, ("none", "auto")),
    "structural_tag": Unserved(_GRAMMAR),
    "bad_words": Unserved(_CHOICE),
    "allowed_token_ids": Unserved(_CHOICE, empty=False),
    "logits_processors": Unserved(_CHOICE),
    "custom_logit_processor": Unserved(_CHOICE),
    "use_beam_search": Unserved(_CHOICE),
    "length_penalty": Unserved(_CHOICE, (1.0,)),
    "early_stopping": Unserved(_CHOICE),
    "typical_p": Unserved(_CHOICE, (1.0,)),
    "stop_regex": Unserved("answers end at strings and token ids; ask by stop or stop_token_ids"),
    "no_stop_trim": Unserved("ask by include_stop_str_in_output"),
    "min_new_tokens": Unserved("ask by min_tokens", (0,)),
    "suffix": Unserved("text after the answer is not supported"),
    "return_tokens_as_token_ids": Unserved("tokens are named by their text"),
    "prompt_embeds": Unserved("prompts are text or token ids"),
    "skip_special_tokens": Unserved(_DETOKENIZING, (True,), empty=False),
    "chat_template": Unserved("the model's own chat template is the only one"),
    "documents": Unserved("documents are not given to the chat template; put them into a message"),
    "mm_processor_kwargs": Unserved("prompts are text alone"),
    "modalities": Unserved("answers are text alone", (["text"],)),
    "audio": Unserved("answers are text alone"),
    "web_search_options": Unserved("nothing is searched"),
    "thinking_token_budget": Unserved("reasoning is not limited apart from the answer", empty=False),
    "lora_request": Unserved(_ADAPTER),
    "lora_path": Unserved(_ADAPTER),
    "vllm_xargs": Unserved("it speaks to extensions of another server"),
    "kv_transfer_params": Unserved("the cluster itself decides where KV is moved", empty=False),
}
"""The rejected fields of all APIs, by name."""
CHAT_UNSERVED: Mapping[str, Unserved] = {
    **UNSERVED,
    "echo": Unserved("prompts are repeated by completions alone"),
    "best_of": Unserved("only as many answers are made as are returned; ask for them by n", (1,), empty=False),
}
COMPLETION_UNSERVED: Mapping[str, Unserved] = {
    **UNSERVED,
    "tools": Unserved(_COMPLETION_TOOLS),
    "tool_choice": Unserved(_COMPLETION_TOOLS, ("none", "auto")),
    "add_generation_prompt": Unserved(_COMPLETION_CHAT, (True,), empty=False),
    "continue_final_message": Unserved(_COMPLETION_CHAT),
}
_CHAT = "it is a field of chat completions alone"
CHAT_ONLY: Mapping[str, Unserved] = {
    **UNSERVED,
    **{
        name: Unserved(_CHAT)
        for name in (
            *("logit_bias", "echo", "return_token_ids", "continue_final_message", "include_stop_str_in_output"),
            *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            *("json_schema", "regex", "ebnf", "add_special_tokens"),
        )
    },
    "n": Unserved("this API has one answer", (1,), empty=False),
    "best_of": Unserved("this API has one answer", (1,), empty=False),
    "logprobs": Unserved(_CHAT, (0,)),
    "top_logprobs": Unserved(_CHAT, (0,)),
    "prompt_logprobs": Unserved(_CHAT, empty=False),
    "truncate_prompt_tokens": Unserved(_CHAT, empty=False),
    "add_generation_prompt": Unserved(_CHAT, (True,), empty=False),
}
"""The rejected fields of the Responses and the Messages API: `UNSERVED`, and fields that only chat completions has."""
MESSAGE_UNSERVED: Mapping[str, Unserved] = {"function_call": Unserved(_FUNCTIONS)}
"""The rejected fields inside messages."""

INERT = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prediction", "verbosity", "include_reasoning", "spaces_between_special_tokens",
    }
)  # fmt: skip
"""The fields that have no effect on this server, such as hints and client metadata; they are accepted silently."""
MESSAGE_INERT = frozenset({"name", "refusal", "annotations", "audio"})
"""The fields inside messages that have no effect on this server."""


class IgnoredLog:
    """Logs the name of each ignored field once. The `HttpCalls` own it; all calls are on the event loop."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Log those of the request's ignored fields that have not been logged before."""
        for name in names:
            if name not in self._said and len(self._said) < _LOGGED_MAX:
                self._said.add(name)
                log.info("requests come with the field %s, which is ignored; --strict-requests refuses them", name)
