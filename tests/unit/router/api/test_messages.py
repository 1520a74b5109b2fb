"""POST /v1/messages and /v1/messages/count_tokens over fake workers, through raw requests and Anthropic's client."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.access.tenants import tenant_of, tenant_salt
from router.api.anthropic.request import parse_message
from router.text.tokenizer import Tokenizer
from tandem.protocol.errors import Internal
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.settings.listeners import ListenerLimits
from tandem.tokenizers.grammars import of_tool_calls
from tests.unit.router.api.test_responses import prompt_text
from tests.unit.router.api.test_tool_calls import ANSWER, ARGUMENTS, FORCED, script
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import answer_token, until

TOOLS: list[Any] = [{"name": name, "description": "d", "input_schema": {"type": "object"}} for name in "fg"]
MESSAGES: list[Any] = [{"role": "user", "content": "Hello there"}]
BODY: dict[str, Any] = {"model": "fake", "max_tokens": 20, "messages": MESSAGES}
CALL = {"city": "Köln", "days": [1, 2]}


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}", timeout=60) as client:
        yield client


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    async with anthropic.AsyncAnthropic(
        base_url=f"http://{cluster.endpoints.http_address}", api_key="none", max_retries=0
    ) as client:
        yield client


def events_of(reply: httpx.Response) -> list[dict[str, Any]]:
    """Returns the events of a stream, whose names are their types."""
    events = []
    for block in reply.text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


async def test_models_in_the_form_of_the_client(client: Any, http: httpx.AsyncClient) -> None:
    page = await client.models.list()
    assert [(model.type, model.id, model.display_name) for model in page.data] == [("model", "fake", "fake")]
    assert (page.has_more, page.first_id, page.last_id) == (False, "fake", "fake")
    assert [model.id async for model in client.models.list(limit=1)] == ["fake"]
    assert (await client.models.retrieve("fake")).created_at == page.data[0].created_at
    assert (await http.get("/v1/models")).json()["object"] == "list"


async def test_a_text(cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    system = [
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief"},
    ]
    for worker in cluster.workers:
        worker.switches.cached_tokens = 7
    reply = await http.post("/v1/messages", json=BODY | {"system": system, "temperature": 0.5, "top_k": 4})
    assert prompt_text(cluster, tokenizer).startswith(
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHello there<|im_end|>"
    )
    prompt = cluster.prefill.prefills[-1].prompt_token_ids
    text = tokenizer.decode([answer_token(prompt, index) for index in range(20)])
    message = reply.json()
    assert message.pop("id").startswith("msg_")
    written = cluster.prefill.prefills[-1].hinted_tokens - 7
    assert 0 < written < len(prompt) // 16 * 16 - 7, "the breakpoint is after the system prompt"
    usage = {
        "input_tokens": len(prompt) - 7 - written,
        "cache_creation_input_tokens": written,
        "cache_creation": {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": 0},
        "cache_read_input_tokens": 7,
    }
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": text}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 20},
    }
    sampling = cluster.prefill.prefills[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 4, 20)
    stop = text[12:15]
    cut = (await http.post("/v1/messages", json=BODY | {"system": system, "stop_sequences": [stop]})).json()
    assert cut["content"][0]["text"] == text[: text.index(stop)]
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)


async def test_thinking_text_and_calls(cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    script(cluster, tokenizer, ANSWER)
    asked = BODY | {"tools": TOOLS, "max_tokens": 500}
    message = (await http.post("/v1/messages", json=asked)).json()
    thinking, text, first, second = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "Look: "}
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "f", CALL)
    assert (second["name"], second["input"]) == ("g", {})
    assert first["id"] != second["id"]
    assert message["stop_reason"] == "tool_use"
    one = await http.post(
        "/v1/messages", json=asked | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    )
    assert [block["type"] for block in one.json()["content"]] == ["thinking", "text", "tool_use"]
    none = await http.post("/v1/messages", json=asked | {"tool_choice": {"type": "none"}})
    assert [block["type"] for block in none.json()["content"]] == ["thinking", "text"]
    assert none.json()["stop_reason"] == "end_turn"


async def test_the_events_of_a_stream(cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    count = script(cluster, tokenizer, ANSWER)
    asked = BODY | {"tools": TOOLS, "max_tokens": 500, "stream": True}
    events = events_of(await http.post("/v1/messages", json=asked))
    kinds = [event["type"] for event in events]
    once = [kind for number, kind in enumerate(kinds) if number == 0 or kind != kinds[number - 1]]
    block = [f"content_block_{name}" for name in ("start", "delta", "stop")]
    # The second call has no arguments, and its block has one delta with "{}".
    assert once == ["message_start", "ping", *block * 4, "message_delta", "message_stop"]
    begun = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert begun == ["thinking", "text", "tool_use", "tool_use"]
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    joined = ["".join(e["delta"].get(name, "") for e in deltas if e["index"] == index) for index, name in
             enumerate(("thinking", "text", "partial_json", "partial_json"))]  # fmt: skip
    assert joined == ["Hm.", "Look: ", ARGUMENTS, "{}"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert events[-2]["usage"]["output_tokens"] == count + 1


async def test_a_round_trip_of_a_call(cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    script(cluster, tokenizer, ANSWER)
    asked = BODY | {"tools": TOOLS, "max_tokens": 500}
    answer = (await http.post("/v1/messages", json=asked)).json()["content"]
    results = [
        {"type": "tool_result", "tool_use_id": answer[2]["id"], "content": "one", "is_error": False},
        {"type": "tool_result", "tool_use_id": answer[3]["id"], "content": [{"type": "text", "text": "two"}]},
        {"type": "text", "text": "Go on"},
    ]
    messages = [*MESSAGES, {"role": "assistant", "content": answer}, {"role": "user", "content": results}]
    script(cluster, tokenizer, "Done")
    final = (await http.post("/v1/messages", json=asked | {"messages": messages})).json()
    assert (final["content"], final["stop_reason"]) == ([{"type": "text", "text": "Done"}], "end_turn")
    text = prompt_text(cluster, tokenizer)
    turns = [turn.partition("\n")[::2] for turn in text.replace("<|im_end|>\n", "").split("<|im_start|>")[1:]]
    assert turns[1:] == [
        ("assistant", "Look: "),
        ("tool", "one"),
        ("tool", "two"),
        ("user", "Go on"),
        ("assistant", ""),
    ]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_forced_call(
    cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer, choice: Any, stream: bool
) -> None:
    script(cluster, tokenizer, FORCED)
    asked = BODY | {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200, "stream": stream}
    reply = await http.post("/v1/messages", json=asked)
    if stream:
        parts = [e["delta"] for e in events_of(reply) if e["type"] == "content_block_delta"]
        assert json.loads("".join(part["partial_json"] for part in parts)) == {"city": "Köln"}
    else:
        (call,) = reply.json()["content"]
        assert (call["name"], call["input"]) == ("f", {"city": "Köln"})
    offered = {name: {"type": "object"} for name in (choice.get("name") or "fg")}
    assert {reservation.sampling.grammar for worker in cluster.workers for reservation in worker.reservations} == {
        of_tool_calls(offered)
    }


async def test_a_call_that_is_cut_has_no_input(cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    script(cluster, tokenizer, FORCED)
    asked = BODY | {"tools": TOOLS, "tool_choice": {"type": "any"}}
    count = len(tokenizer.encode(FORCED))
    message = (await http.post("/v1/messages", json=asked | {"max_tokens": count - 3})).json()
    assert message["stop_reason"] == "max_tokens"
    assert [block["input"] for block in message["content"] if block["type"] == "tool_use"] == [{}]


async def test_formats_and_effort(cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    script(cluster, tokenizer, '{"a": 1}')
    for fields in (
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}}},
        {"output_format": {"type": "json_schema", "schema": schema}},
    ):
        message = (await http.post("/v1/messages", json=BODY | fields)).json()
        assert json.loads(message["content"][0]["text"]) == {"a": 1}
        assert cluster.decode.reservations[-1].sampling.grammar


async def test_count_tokens(cluster: Cluster, http: httpx.AsyncClient) -> None:
    more = {"system": "S", "tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    counted = await http.post("/v1/messages/count_tokens", json={"messages": MESSAGES, **more})
    assert counted.status_code == 200, counted.text
    await http.post("/v1/messages", json=BODY | more)
    assert counted.json() == {"input_tokens": len(cluster.prefill.prefills[-1].prompt_token_ids)}
    unknown = await http.post("/v1/messages/count_tokens", json={"messages": MESSAGES, "zap": 1, "max_tokens": 9})
    assert unknown.headers["x-tandem-ignored"] == "zap"


async def test_a_request_of_an_agent(cluster: Cluster, http: httpx.AsyncClient) -> None:
    """Hints about caching, budgets and bookkeeping are accepted, none of them is ignored with a header."""
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    text = {"type": "text", "text": "Hello", **cached}
    body = BODY | {
        "messages": [{"role": "user", "content": [text]}],
        "system": [text],
        "tools": [{**TOOLS[0], **cached, "eager_input_streaming": True, "strict": True}],
        "thinking": {"type": "enabled", "budget_tokens": 10_000, "display": "summarized"},
        "metadata": {"user_id": "me"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 1000}},
        "service_tier": "auto",
        "fallbacks": "default",
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27"}
    reply = await http.post("/v1/messages?beta=true", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert "x-tandem-ignored" not in reply.headers
    assert reply.headers["request-id"] == reply.headers["x-request-id"] == reply.json()["id"]


TAIL = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c " * 30}]
FIVE_MINUTES, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


@pytest.mark.parametrize(
    ("where", "retention_s"),
    [
        ({}, 0.0),
        ({"cache_control": None}, 0.0),
        ({"cache_control": FIVE_MINUTES}, 300.0),
        ({"cache_control": HOUR}, 3600.0),
        ({"tools": [{**TOOLS[0], "cache_control": HOUR}], "cache_control": FIVE_MINUTES}, 3600.0),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": HOUR}]}]}, 3600.0),
    ],
)
async def test_cache_control_is_how_long_the_prompt_is_kept(
    cluster: Cluster, http: httpx.AsyncClient, where: dict[str, Any], retention_s: float
) -> None:
    usage = (await http.post("/v1/messages", json=BODY | where)).json()["usage"]
    for work in (cluster.prefill.prefills[-1], cluster.decode.reservations[-1]):
        assert work.retention_s == retention_s
    prompt = len(cluster.prefill.prefills[-1].prompt_token_ids)
    written = prompt // 16 * 16 if retention_s else 0
    assert usage["cache_creation_input_tokens"] == written
    assert usage["input_tokens"] == prompt - written
    if retention_s:
        hour = retention_s == 3600.0
        lifetimes = {"ephemeral_5m_input_tokens": 0 if hour else written, "ephemeral_1h_input_tokens": hour * written}
        assert usage["cache_creation"] == lifetimes
    else:
        assert "cache_creation" not in usage


def marked(text: str, control: dict[str, str] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": text} | ({"cache_control": control} if control else {})


@pytest.mark.parametrize(
    ("where", "hinted"),
    [
        ({"system": [marked("a " * 40), marked("b", FIVE_MINUTES)]}, 1),
        ({"tools": [{**TOOLS[0], "cache_control": FIVE_MINUTES}], "system": "a " * 40}, 1),
        ({"messages": [{"role": "user", "content": [marked("a " * 90, FIVE_MINUTES)]}, *TAIL]}, 1),
        ({"system": "s", "messages": [*TAIL, {"role": "user", "content": [marked("a", FIVE_MINUTES)]}, *TAIL]}, 4),
    ],
)
async def test_only_the_prompt_up_to_the_last_breakpoint_is_kept(
    cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer, where: dict[str, Any], hinted: int
) -> None:
    usage = (await http.post("/v1/messages", json=BODY | where)).json()["usage"]
    task, reservation = cluster.prefill.prefills[-1], cluster.decode.reservations[-1]
    assert (task.retention_s, task.hinted_s) == (0.0, 300.0)
    assert (reservation.hinted_s, reservation.hinted_tokens) == (task.hinted_s, task.hinted_tokens)
    # A breakpoint counts for its whole message.
    kept = tokenizer.decode_all(task.prompt_token_ids[: task.hinted_tokens])
    rest = tokenizer.decode_all(task.prompt_token_ids[task.hinted_tokens :])
    assert kept.count("<|im_end|>") == hinted
    assert kept + rest == tokenizer.decode_all(task.prompt_token_ids)
    assert usage["cache_creation_input_tokens"] <= task.hinted_tokens


@pytest.mark.parametrize(
    ("where", "field"),
    [
        ({"cache_control": {"type": "forever"}}, "cache_control.type"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"cache_control": {}}, "cache_control.type"),
        ({"system": [{"type": "text", "text": "a", "cache_control": 3}]}, "system[0].cache_control"),
        ({"system": [{"type": "text", "text": "a", "cache_control": HOUR}] * 5}, "cache_control"),
    ],
)
async def test_cache_control_is_checked(http: httpx.AsyncClient, where: dict[str, Any], field: str) -> None:
    reply = await http.post("/v1/messages", json=BODY | where)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(f"{field}: "), reply.text


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ({"messages": [*MESSAGES, {"role": "user", "content": "a\0"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
     "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}, *MESSAGES]},
     "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": MESSAGES * 5000}, "messages"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"system": "\0"}, "system.content"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "h"}}, "tool_choice.name"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"logprobs": True}, "logprobs"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
    ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
    ({"thread": {}}, "thread"),
    ({"messages": [*MESSAGES, {"role": "system", "content": "a", "clear_at": "next_user_message"}]},
     "messages[1].clear_at"),
    ({"messages": [*MESSAGES, {"role": "system", "content": "a", "output_config": {"effort": "low"}}]},
     "messages[1].output_config"),
    ({"tools": [{**TOOLS[0], "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
    ({"tools": [{**TOOLS[0], "input_examples": [3]}]}, "tools[0].input_examples[0]"),
]  # fmt: skip
BAD_MESSAGES = [
    *BAD,
    ({"messages": [*MESSAGES, {"role": "assistant", "content": "The"}]}, "messages[1]"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"compaction": {"type": "summarize"}}, "compaction"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_bad_fields_are_named_and_lose_nothing(cluster: Cluster, http: httpx.AsyncClient, path: str) -> None:
    for fields, name in BAD if path.endswith("count_tokens") else BAD_MESSAGES:
        reply = await http.post(path, json=BODY | fields)
        error = reply.json()
        assert (reply.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
        assert error["error"]["message"].startswith(f"{name}: "), error
    for body in (b"", b"[]", b'{"messages": "\xff"}', b"[" * 5000):
        assert (await http.post(path, content=body)).json()["error"]["type"] == "invalid_request_error"
    assert (await http.post(path, json=BODY)).status_code == 200


async def test_a_thread_is_refused_with_the_details_by_which_clients_send_the_whole_conversation(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
            reply = await http.post(path, json=BODY | {"thread": thread})
            assert reply.status_code == 400
            assert reply.json()["error"]["details"] == {
                "error_code": "thread_unsupported_request",
                "unsupported": ["thread"],
            }
    other = await http.post("/v1/messages", json=BODY | {"temperature": -1})
    assert "details" not in other.json()["error"]
    assert (await http.post("/v1/messages", json=BODY | {"thread": None})).status_code == 200


async def test_a_tools_examples_and_failed_calls_reach_the_model(cluster: Cluster, http: httpx.AsyncClient) -> None:
    """They are in the tools and messages that the chat template gets."""
    tool = {**TOOLS[0], "input_examples": [{"city": "Köln"}], "allowed_callers": ["direct", "code_execution_20260120"]}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    failed = {"type": "tool_result", "tool_use_id": "1", "content": "no such city", "is_error": True}
    messages = [*MESSAGES, {"role": "assistant", "content": [call]}, {"role": "user", "content": [failed]}]
    body = BODY | {"tools": [tool], "messages": messages}
    prompt: Any = parse_message(
        json.dumps(body).encode(), EventTime.now(LifecycleEvent.RECEIVED), strict=True
    ).request.prompt
    (made,) = prompt.tools.shown
    assert made["function"]["parameters"] == {"type": "object", "examples": [{"city": "Köln"}]}
    assert prompt.turns[-1].content == "Error: no such city"
    assert (await http.post("/v1/messages", json=body | {"tool_choice": {"type": "any"}})).status_code == 200


async def test_a_deferred_tool_is_offered_once_a_search_has_found_it(cluster: Cluster, http: httpx.AsyncClient) -> None:
    """Claude Code's search of tools answers with references to those that it found."""
    tools = [TOOLS[0], {**TOOLS[1], "defer_loading": True}]
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "g"}]}
    later = [*MESSAGES, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    for messages, offered in ((MESSAGES, ["f"]), (later, ["f", "g"])):
        body = BODY | {"tools": tools, "messages": messages}
        prompt: Any = parse_message(
            json.dumps(body).encode(), EventTime.now(LifecycleEvent.RECEIVED), strict=True
        ).request.prompt
        assert [tool["function"]["name"] for tool in prompt.tools.shown] == offered
        assert (await http.post("/v1/messages", json=body)).status_code == 200
    assert prompt.turns[-1].content == "The tool g can be called now.\n"


async def test_other_errors_have_anthropics_form(cluster: Cluster, http: httpx.AsyncClient) -> None:
    async def error(method: str, path: str, body: Any = None) -> tuple[int, str, str]:
        reply = await http.request(method, path, json=body)
        content = reply.json()
        assert content["type"] == "error"
        return reply.status_code, content["error"]["type"], content["error"]["message"]

    assert (await error("POST", "/v1/messages", BODY | {"model": "other"}))[:2] == (404, "not_found_error")
    assert (await error("GET", "/v1/messages"))[:2] == (405, "invalid_request_error")
    assert (await error("POST", "/v1/messages/batches", {}))[:2] == (404, "not_found_error")
    status, kind, message = await error("POST", "/v1/messages", BODY | {"max_tokens": 10**6})
    assert (status, kind) == (400, "invalid_request_error")
    match = re.fullmatch(r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)", message)
    assert match is not None, message
    counted = (await http.post("/v1/messages/count_tokens", json=BODY)).json()["input_tokens"]
    assert [int(group) for group in match.groups()] == [counted, 10**6, 2048]
    long = BODY | {"messages": [{"role": "user", "content": "fox " * 4000}]}
    status, kind, message = await error("POST", "/v1/messages", long)
    assert (status, kind) == (400, "invalid_request_error")
    match = re.fullmatch(r"prompt is too long: (\d+) tokens > 2047 maximum", message)
    assert match is not None, message
    assert int(match[1]) >= 2048
    cluster.prefill.switches.prefill_error = Internal("a defect")
    assert (await error("POST", "/v1/messages", BODY))[:2] == (500, "api_error")
    (failed,) = events_of(await http.post("/v1/messages", json=BODY | {"stream": True}))
    assert (failed["type"], failed["error"]["type"]) == ("error", "api_error")
    cluster.prefill.switches.prefill_error = None
    assert (await http.post("/v1/messages", json=BODY)).status_code == 200


async def test_the_official_client(cluster: Cluster, client: Any, tokenizer: Tokenizer) -> None:
    import anthropic

    script(cluster, tokenizer, ANSWER)
    asked: dict[str, Any] = BODY | {"tools": TOOLS, "max_tokens": 500}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (message.content[0].thinking, message.content[1].text) == ("Hm.", "Look: ")
        assert (message.content[2].name, message.content[2].input) == ("f", CALL)
        assert message.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "one"}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result, {**result, "tool_use_id": whole.content[3].id}]},
    ]
    counted = await client.messages.count_tokens(model="fake", messages=messages, tools=TOOLS)
    final = await client.messages.create(**asked | {"messages": messages})
    assert counted.input_tokens == final.usage.input_tokens
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await client.messages.create(**BODY | {"max_tokens": -1})
    cluster.prefill.switches.prefill_error = Internal("a defect")
    with pytest.raises(anthropic.APIStatusError):
        async with client.messages.stream(**asked) as stream:
            await stream.get_final_message()
    cluster.prefill.switches.prefill_error = None


async def test_a_client_that_leaves_aborts_its_answer(cluster: Cluster, http: httpx.AsyncClient) -> None:
    cluster.decode.switches.held_at = 2
    async with http.stream("POST", "/v1/messages", json=BODY | {"stream": True}) as reply:
        async for line in reply.aiter_lines():
            if "content_block_delta" in line:
                break
    await until(lambda: not cluster.router._dispatcher._live, "its answer is aborted")
    cluster.decode.go.set()


class TestKeys:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_keys": ("one", "two")}

    async def test_a_key_comes_in_either_header_but_once(self, cluster: Cluster, http: httpx.AsyncClient) -> None:
        async def ask(path: str, *headers: tuple[str, str]) -> tuple[int, str]:
            reply = await http.post(path, json=BODY, headers=list(headers))
            return reply.status_code, reply.json().get("error", {}).get("type", "")

        bearer = "authorization", "Bearer two"
        cluster.decode.switches.held_at = 2
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            for headers in ((), (("x-api-key", "three"),), (("x-api-key", ""),), (("authorization", "two"),)):
                assert await ask(path, *headers) == (401, "authentication_error")
            for headers in ((("x-api-key", "two"), ("x-api-key", "two")), (("x-api-key", "one"), bearer)):
                assert await ask(path, *headers) == (400, "invalid_request_error")
        refused = (await http.post("/v1/messages", json=BODY)).json()
        assert refused["error"]["message"].endswith("send 'Authorization: Bearer <key>' or x-api-key")
        cluster.decode.go.set()
        assert (await ask("/v1/messages", ("x-api-key", "two")))[0] == 200
        assert (await ask("/v1/messages", bearer))[0] == 200
        assert {reservation.cache_salt for reservation in cluster.decode.reservations} == {
            tenant_salt(tenant_of("two"), "")
        }
        for path in ("/v1/models", "/v1/models/fake"):
            assert (await http.get(path, headers={"x-api-key": "one"})).status_code == 200
            assert (await http.get(path, headers={"x-api-key": "three"})).status_code == 401
            assert (await http.get(path, headers=[("x-api-key", "one"), bearer])).status_code == 400
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/modelsx"), ("GET", "/metrics")):
            assert (await http.request(method, path, headers={"x-api-key": "one"})).status_code == 401


class TestLimits:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"strict_requests": True, "listeners": ListenerLimits(max_request_bytes=50_000, max_calls=1)}

    async def test_they_hold_here_too(self, cluster: Cluster, http: httpx.AsyncClient) -> None:
        large = [{"role": "user", "content": "a" * 60_000}]
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            for fields in ({"messages": large}, {"zap": 1}):
                reply = await http.post(path, json=BODY | fields)
                assert (reply.status_code, reply.json()["type"]) == (400, "error")
        cluster.decode.switches.held_at = 2
        running = asyncio.create_task(http.post("/v1/messages", json=BODY))
        await until(lambda: len(cluster.router._dispatcher._live) == 1, "it is in progress")
        over = await http.post("/v1/messages", json=BODY)
        assert (over.status_code, over.json()["error"]["type"]) == (429, "rate_limit_error")
        assert over.headers["retry-after"] == "1"
        cluster.decode.go.set()
        assert (await running).status_code == 200
