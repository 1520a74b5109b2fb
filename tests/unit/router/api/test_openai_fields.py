"""Request fields outside the OpenAI API: rejected by name, silently accepted, or ignored, at the HTTP listener."""

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.api.openai.requests import parse_chat, parse_completion
from router.api.unserved_fields import CHAT_UNSERVED, COMPLETION_UNSERVED, IgnoredLog
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tests.unit.router.conftest import Cluster

NOW = EventTime.now(LifecycleEvent.RECEIVED)
USER = {"role": "user", "content": "Hello there"}
CHAT: dict[str, Any] = {"model": "fake", "messages": [USER], "max_tokens": 4}
TEXT: dict[str, Any] = {"model": "fake", "prompt": "x", "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "f"}}

REFUSED: dict[str, Any] = {
    "kv_transfer_params": {},
    "function_call": "f",
    "structural_tag": {"format": {}},
    "use_beam_search": True,
    "length_penalty": 1.5,
    "logits_processors": ["x"],
    "bad_words": ["x"],
    "allowed_token_ids": [],
    "skip_special_tokens": False,
    "documents": [{"text": "x"}],
    "chat_template": "{{ messages }}",
    "suffix": "end",
}
NEUTRAL: dict[str, Any] = {
    "tools": [],
    "tool_choice": "auto",
    "functions": [],
    "response_format": {"type": "text"},
    "logit_bias": {},
    "use_beam_search": False,
    "length_penalty": 1,
    "early_stopping": False,
    "best_of": 1,
    "guided_json": None,
    "guided_choice": [],
    "regex": "",
    "structured_outputs": {},
    "truncate_prompt_tokens": None,
    "kv_transfer_params": None,
    "bad_words": [],
    "continue_final_message": False,
    "add_generation_prompt": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "return_token_ids": False,
    "documents": [],
    "echo": False,
    "suffix": "",
    "top_k": -1,
    "seed": -1,
    "stop": "",
    "n": 1,
    "min_tokens": 0,
    "include_stop_str_in_output": False,
    "user": "me",
    "metadata": {"a": "b"},
}


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}", timeout=60) as client:
        yield client


def chat(**fields: Any) -> bytes:
    return json.dumps(CHAT | fields).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps(TEXT | fields).encode()


def test_what_would_change_the_answer_is_refused_by_name() -> None:
    for name, value in REFUSED.items():
        for parse, body in ((parse_chat, chat), (parse_completion, completion)):
            with pytest.raises(InvalidArgument, match=f"^{name}: is not supported") as error:
                parse(body(**{name: value}), NOW)
            assert error.value.field == name
    for name, value in (("echo", True), ("best_of", 2)):
        with pytest.raises(InvalidArgument, match=f"^{name}: is not supported"):
            parse_chat(chat(**{name: value}), NOW)
    for name, value in (("add_generation_prompt", False), ("continue_final_message", True), ("tools", [TOOL])):
        with pytest.raises(InvalidArgument, match=f"^{name}: is not supported"):
            parse_completion(completion(**{name: value}), NOW)


def test_true_is_not_one_and_zero_is_not_false() -> None:
    for fields in ({"best_of": True}, {"length_penalty": True}, {"length_penalty": 0}, {"echo": 0}):
        with pytest.raises(InvalidArgument):
            parse_completion(completion(**fields), NOW)


def test_neutral_values_of_anything_are_accepted_where_requests_are_strict() -> None:
    plain, plain_text = parse_chat(chat(), NOW).request.options, parse_completion(completion(), NOW).request.options
    for name, value in NEUTRAL.items():
        for parse, body, without in ((parse_chat, chat, plain), (parse_completion, completion, plain_text)):
            call = parse(body(**{name: value}), NOW, strict=True)
            assert call.ignored == ()
            options = call.request.options
            assert (options.top_k or 0, options.seed, options.stop) == (without.top_k or 0, without.seed, without.stop)
    assert parse_chat(chat(add_special_tokens=False), NOW, strict=True).ignored == ()
    assert parse_completion(completion(add_special_tokens=True), NOW, strict=True).ignored == ()


def test_a_reason_stands_beside_each_refused_field() -> None:
    for table in (CHAT_UNSERVED, COMPLETION_UNSERVED):
        for name, rule in table.items():
            assert rule.reason, name
            assert not rule.reason.endswith("."), name


async def test_inert_unknown_fields_are_ignored_and_named_in_a_header(http: httpx.AsyncClient) -> None:
    old = [USER | {"id": 7}, {"role": "assistant", "content": "Hi", "reasoning_content": "hm"}, USER | {"id": 8}]
    fields = {"tempreature": 1, "stream_options": {"x": 1}, "messages": old, "request_id": "a"}
    for stream in (False, True):
        reply = await http.post("/v1/chat/completions", json={**CHAT, **fields, "stream": True} if stream else
                                {**CHAT, **fields, "stream_options": None})  # fmt: skip
        assert reply.status_code == 200, reply.text
        names = set(reply.headers["x-tandem-ignored"].split(", "))
        wanted = {"tempreature", "messages[].id", "request_id"}
        assert names == wanted | ({"stream_options.x"} if stream else set())
    assert "x-tandem-ignored" not in (await http.post("/v1/chat/completions", json=CHAT)).headers


def test_names_of_ignored_fields_are_bounded_and_fit_for_a_header() -> None:
    odd = parse_chat(chat(**{"a\r\nset-cookie: x": 1, "ü" * 1000: 2, "": 3}), NOW).ignored
    assert odd == ("a??set-cookie??x", "?" * 64, "?")
    many = parse_chat(chat(**{f"field{number}": 1 for number in range(1000)}), NOW).ignored
    assert len(many) == 16


@pytest.mark.parametrize("name", ["", " ", "\r\nx: y", "\0", "a,b", "\U0001f600", "%s", "\ud800"])
async def test_a_header_holds_the_names_of_any_fields(cluster: Cluster, http: httpx.AsyncClient, name: str) -> None:
    body = json.dumps(CHAT | {name: 1, "messages": [USER | {name: 1}], "stream_options": None})
    reply = await http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 200, reply.text
    safe = "".join(character if character.isascii() and character.isalnum() else "?" for character in name)
    assert set(reply.headers["x-tandem-ignored"].split(", ")) == {safe or "?", f"messages[].{safe}"}


def test_each_ignored_name_is_logged_once_up_to_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    said = IgnoredLog()
    for _ in range(3):
        said.note(["reasoning", "id"])
    assert len(caplog.records) == 2
    for number in range(1000):
        said.note([f"field{number}"])
    assert len(caplog.records) == 256


class TestStrictRequests:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"strict_requests": True}

    async def test_unknown_fields_are_refused(self, cluster: Cluster, http: httpx.AsyncClient) -> None:
        for fields, name in (
            ({"tempreature": 1}, "tempreature"),
            ({"messages": [USER, USER | {"id": 3}]}, "messages[1].id"),
            ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ):
            reply = await http.post("/v1/chat/completions", json=CHAT | fields)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200


def test_an_assistant_may_have_said_nothing() -> None:
    for message in (
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "tool_calls": []},
    ):
        call = parse_chat(chat(messages=[USER, message, USER]), NOW, strict=True)
        assert call.request.prompt.turns[1].content == ""  # type: ignore[union-attr]
    with pytest.raises(InvalidArgument, match=r"messages\[1\].tool_calls\[0\].id: is missing"):
        parse_chat(chat(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [TOOL]}]), NOW)
    with pytest.raises(InvalidArgument, match=r"messages\[0\].content"):
        parse_chat(chat(messages=[{"role": "user", "content": None}]), NOW)


def events_of(text: str) -> list[dict[str, Any]]:
    events = text.strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_continuous_usage_counts_every_token(http: httpx.AsyncClient, path: str) -> None:
    body = (CHAT if path.startswith("chat") else TEXT) | {"max_tokens": 20, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    for extra in ({}, {"n": 2}, {"logprobs": True} if path.startswith("chat") else {"logprobs": 1}):
        reply = await http.post(f"/v1/{path}", json=body | extra | {"stream_options": options})
        events = events_of(reply.text)
        last = events[-1]["usage"]
        assert last["completion_tokens"] == 20 * extra.get("n", 1)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-2] == counts[-1], "the last event of a choice knows all of them"
        for usage in (event["usage"] for event in events):
            assert usage["prompt_tokens"] == last["prompt_tokens"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    without = {"continuous_usage_stats": True}
    for event in events_of((await http.post(f"/v1/{path}", json=body | {"stream_options": without})).text):
        assert "usage" not in event


async def test_a_stop_string_may_be_part_of_the_answer(http: httpx.AsyncClient) -> None:
    body = CHAT | {"max_tokens": 40}
    whole = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]
    stop = whole[12:15]
    for extra, wanted in (
        ({}, whole[: whole.index(stop)]),
        ({"include_stop_str_in_output": True}, whole[: whole.index(stop) + 3]),
    ):
        reply = (await http.post("/v1/chat/completions", json=body | extra | {"stop": stop})).json()
        assert reply["choices"][0]["message"]["content"] == wanted
        assert reply["choices"][0]["finish_reason"] == "stop"


def _nested(depth: int) -> list[Any]:
    return [] if not depth else [_nested(depth - 1)]


async def test_variables_of_the_template_and_least_lengths(cluster: Cluster, http: httpx.AsyncClient) -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "min_tokens": 3}
    reply = await http.post("/v1/chat/completions", json=CHAT | fields)
    assert reply.status_code == 200, reply.text
    assert "x-tandem-ignored" not in reply.headers
    assert cluster.prefill.prefills[-1].sampling.min_tokens == 3
    parsed = parse_chat(chat(**fields), NOW).request.prompt
    assert parsed.variables == {"reasoning_effort": "low", "enable_thinking": False}  # type: ignore[union-attr]
    for bad, field in (
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "y" * 20000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"x": _nested(700)}}, "chat_template_kwargs"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"min_tokens": "3"}, "min_tokens"),
    ):
        reply = await http.post("/v1/chat/completions", json=CHAT | bad)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("text", ["\ud800", "a\0b"])
async def test_variables_of_the_template_are_text_for_the_tokenizer(http: httpx.AsyncClient, text: str) -> None:
    """Regression: a template that shows a variable gave the tokenizer a lone surrogate, and the client a 500."""
    for fields in ({"reasoning_effort": text}, {"chat_template_kwargs": {"x": [text]}}):
        for path in ("/v1/chat/completions", "/tokenize"):
            reply = await http.post(path, content=chat(**fields))
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "chat_template_kwargs")


async def test_a_backslash_before_u0000_is_text_and_no_nul(http: httpx.AsyncClient) -> None:
    """Regression: agents that edit code with such an escape in it were told that a call has a NUL character."""

    def conversation(code: str) -> dict[str, Any]:
        function = {"name": "f", "arguments": json.dumps({"code": code})}
        call = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
        return {"messages": [*CHAT["messages"], call, *CHAT["messages"]]}

    for code, status in ((r"c === '\u0000'", 200), (r"\\u0000", 200), ("c === '\0'", 400), ("\\\0", 400)):
        reply = await http.post("/v1/chat/completions", json=CHAT | conversation(code))
        assert reply.status_code == status, reply.text
