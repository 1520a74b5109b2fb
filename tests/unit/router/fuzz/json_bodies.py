"""Bodies of the two OpenAI calls: valid ones, valid ones with a few odd fields, and text that is hardly JSON."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["\0", "\ud800", "\ufeff", "<|im_start|>", "\u202e", "é" * 3000, "你好😀", "Infinity", "1e999"]),
)
NUMBERS = st.one_of(
    st.integers(-3, 20),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**300, -0.0, 1e-320, 1e308]),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
_FLAT = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(TEXTS, SCALARS, max_size=2))
VALUES = st.one_of(SCALARS, _FLAT, st.lists(_FLAT, max_size=2), st.dictionaries(TEXTS, _FLAT, max_size=2))
FIELDS = [
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options"),
    *("temperature", "top_p", "top_k", "min_p", "n", "best_of", "stop", "stop_token_ids", "seed", "logprobs", "echo"),
    *("top_logprobs", "prompt_logprobs", "suffix", "logit_bias", "user", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "ignore_eos", "priority", "slo_class", "cache_salt", "tools", "tool_choice", "functions"),
    *("response_format", "chat_template_kwargs", "chat_template", "add_generation_prompt", "skip_special_tokens"),
    *("continue_final_message", "include_stop_str_in_output", "add_special_tokens", "truncate_prompt_tokens"),
    *("return_token_ids", "use_beam_search", "length_penalty", "guided_json", "structured_outputs", "metadata"),
    *("kv_transfer_params", "store", "service_tier", "parallel_tool_calls", "reasoning_effort", "request_id"),
]
_USUAL: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 4),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "n": st.integers(1, 3),
    "stop": TEXTS | st.lists(TEXTS, max_size=3),
    "logprobs": st.booleans() | st.integers(0, 5),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(0, 2),
    "echo": st.booleans(),
    "best_of": st.integers(1, 3),
    "prompt_logprobs": st.integers(0, 5),
    "logit_bias": st.dictionaries(st.integers(0, 99).map(str), st.floats(-100, 100), max_size=3),
}
_ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer", "", "USER"])
_PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "input_text", ""])}, optional={"text": TEXTS}
)
_CONTENTS = st.one_of(TEXTS, st.none(), st.lists(_PARTS | VALUES, max_size=3), VALUES)
_MESSAGES = st.one_of(
    st.just([{"role": "user", "content": "Hi"}]),
    st.lists(
        st.fixed_dictionaries(
            {}, optional={"role": _ROLES, "content": _CONTENTS, "tool_calls": VALUES, "name": TEXTS, "id": SCALARS}
        ),
        max_size=4,
    ),
    VALUES,
)
_PROMPTS = st.one_of(st.just([5, 6, 7, 8]), TEXTS, st.lists(NUMBERS, max_size=6), st.lists(TEXTS, max_size=3), VALUES)


@st.composite
def bodies(draw: st.DrawFn, *, chat: bool) -> dict[str, Any]:
    """Returns a body with a mostly small token limit, in which none or some fields have arbitrary values."""
    body: dict[str, Any] = {"max_tokens": 2}
    body |= {"messages": draw(_MESSAGES)} if chat else {"prompt": draw(_PROMPTS)}
    for name in draw(st.lists(st.sampled_from(sorted(_USUAL)), max_size=3, unique=True)):
        body[name] = draw(_USUAL[name])
    for name in draw(st.lists(st.sampled_from(FIELDS) | TEXTS, max_size=3, unique=True)):
        body[name] = draw(VALUES)
    return body


def _nested(depth: int, opening: str, closing: str) -> str:
    return opening * depth + "1" + closing * depth


_NOT_QUITE_JSON = st.one_of(
    st.binary(max_size=60),
    st.builds(
        _nested, st.sampled_from([10, 1000, 100_000]), st.sampled_from(["[", '{"a":']), st.sampled_from(["", "]", "}"])
    ).map(str.encode),
    st.sampled_from(
        [
            b"",
            b"null",
            b"[]",
            b'{"prompt": "a", "prompt": "b", "max_tokens": 1, "max_tokens": 1}',
            b'{"prompt": "a", "max_tokens": ' + b"1" * 5000 + b"}",
            b'{"prompt": "a", "temperature": NaN, "max_tokens": 1}',
            b'{"prompt": "a", "temperature": -Infinity}',
            b'{"prompt": "\\ud83d", "max_tokens": 1}',
            b'{"prompt": "\xff\xfe", "max_tokens": 1}',
            b"\xef\xbb\xbf{}",
        ]
    ),
)


@st.composite
def encoded(draw: st.DrawFn, *, chat: bool) -> bytes:
    """Returns the bytes of such a body, in UTF-8 most of the time, sometimes damaged."""
    if draw(st.integers(0, 5)) == 0:
        return draw(_NOT_QUITE_JSON)
    text = json.dumps(draw(bodies(chat=chat)))
    data = text.encode(draw(st.sampled_from(["utf-8"] * 6 + ["utf-16", "utf-8-sig", "utf-32-be"])))
    if draw(st.integers(0, 7)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=4)) + data[at + draw(st.integers(0, 4)) :]
    return data
