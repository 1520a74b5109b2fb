"""The fields beyond OpenAI's and Anthropic's that every body may have, by vLLM's names, and Tandem's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from router.api.bodies.body import LIST, Body
from router.api.unserved_fields import UNSERVED, Unserved
from router.requests.request import Options

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
"""The fields of chat completions and completions that would change the answer and that no other API has."""


class Extensions(Body):
    """The options of sampling and placement that chat completions have, too."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: Annotated[list[int], LIST] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    speculate: bool | None = None
    priority: int | None = None
    slo_class: str | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def options(self, **given: Any) -> Options:
        """Return the options of a request; `given` are those with names of their own in an API."""
        return Options(
            temperature=self.temperature,
            top_p=self.top_p,
            # vLLM's clients send -1 for a disabled filter and for a random seed.
            top_k=0 if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=None if self.seed == -1 else self.seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            speculate=self.speculate is not False,
            priority=self.priority or 0,
            slo_class=self.slo_class or "",
            cache_salt=self.cache_salt or "",
            **given,
        )
