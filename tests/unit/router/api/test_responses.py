"""POST /v1/responses over fake workers, through the official client and raw requests."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from router.api.openai.responses_request import parse_response
from router.text.tokenizer import Tokenizer
from tandem.protocol.errors import Internal
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.settings.listeners import ListenerLimits
from tandem.tokenizers.grammars import of_tool_calls
from tests.unit.router.api.test_tool_calls import ANSWER, ARGUMENTS, FORCED, script
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import answer_token, until

TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": "d", "parameters": {"type": "object"}, "strict": False}
    for name in "fg"
]
BODY = {"model": "fake", "input": "Hello there"}


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{cluster.endpoints.http_address}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}", timeout=60) as client:
        yield client


def prompt_text(cluster: Cluster, tokenizer: Tokenizer) -> str:
    ids = cluster.prefill.prefills[-1].prompt_token_ids
    return str(tokenizer._inner.decode(ids, skip_special_tokens=False))


async def test_a_text(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    reply = await client.responses.create(
        **BODY,
        instructions="Be brief",
        max_output_tokens=20,
        temperature=0.5,
        top_p=0.75,
        metadata={"a": "b"},
        store=True,
        extra_body={"seed": 3, "top_k": 4},
    )
    assert prompt_text(cluster, tokenizer).startswith(
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHello there<|im_end|>"
    )
    prompt = cluster.prefill.prefills[-1].prompt_token_ids
    assert reply.output_text == tokenizer.decode([answer_token(prompt, index) for index in range(20)])
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert (reply.object, reply.id.startswith("resp_"), reply.model) == ("response", True, "fake")
    assert (reply.instructions, reply.metadata, reply.store) == ("Be brief", {"a": "b"}, False)  # type: ignore[attr-defined]
    assert (reply.temperature, reply.top_p, reply.max_output_tokens) == (0.5, 0.75, 20)
    usage = reply.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (len(prompt), 20, len(prompt) + 20)
    sampling = cluster.prefill.prefills[-1].sampling
    assert (sampling.max_tokens, sampling.seed, sampling.top_k) == (20, 3, 4)


async def test_an_answer_that_ends_is_complete_and_its_cached_tokens_are_reported(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    script(cluster, tokenizer, "Yes")
    for worker in cluster.workers:
        worker.switches.cached_tokens = 7
    reply = await client.responses.create(**BODY)
    assert (reply.status, reply.output_text, reply.incomplete_details) == ("completed", "Yes", None)
    assert reply.usage is not None
    assert reply.usage.input_tokens_details.cached_tokens == 7
    assert reply.usage.output_tokens_details.reasoning_tokens == 0


async def test_reasoning_text_and_calls(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    count = script(cluster, tokenizer, ANSWER)
    reply = await client.responses.create(**BODY, tools=TOOLS, max_output_tokens=500)
    thought, message, first, second = reply.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Hm.")  # type: ignore[union-attr,index]
    assert (message.type, reply.output_text) == ("message", "Look: ")
    assert (first.name, first.arguments, first.status) == ("f", ARGUMENTS, "completed")  # type: ignore[union-attr]
    assert (second.name, second.arguments) == ("g", "{}")  # type: ignore[union-attr]
    assert first.call_id != second.call_id  # type: ignore[union-attr]
    assert reply.usage is not None
    assert reply.usage.output_tokens == count + 1
    assert 0 < reply.usage.output_tokens_details.reasoning_tokens < count
    assert [tool.name for tool in reply.tools] == ["f", "g"]  # type: ignore[union-attr]


async def test_the_events_of_a_stream(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    script(cluster, tokenizer, ANSWER)
    events = [event async for event in await client.responses.create(**BODY, tools=TOOLS, stream=True)]
    cut = events[-1]
    assert (cut.type, cut.response.status) == ("response.incomplete", "incomplete")  # type: ignore[union-attr]
    stream = await client.responses.create(**BODY, tools=TOOLS, max_output_tokens=500, stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for number, kind in enumerate(kinds) if number == 0 or kind != kinds[number - 1]]
    part = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    reasoning, text = ([pattern.format(name) for pattern in part] for name in ("reasoning_text", "output_text"))
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    items = [["output_item.added", *part_events, "output_item.done"] for part_events in (reasoning, text, call, call)]
    assert once == ["created", "in_progress", *(kind for item in items for kind in item), "completed"]
    final = events[-1].response  # type: ignore[union-attr]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in done] == [0, 1, 2, 3]
    assert [event.item for event in done] == final.output
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas if event.output_index == 2) == ARGUMENTS
    assert final.output_text == "".join(event.delta for event in events if event.type == "response.output_text.delta")


async def test_the_clients_own_stream(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    script(cluster, tokenizer, ANSWER)
    asked: Any = {**BODY, "tools": TOOLS, "max_output_tokens": 500}
    async with client.responses.stream(**asked) as stream:
        streamed = await stream.get_final_response()
    whole = await client.responses.create(**asked)
    texts = [
        [(item.type, getattr(item, "arguments", "")) for item in response.output] for response in (streamed, whole)
    ]
    assert texts[0] == texts[1]
    assert streamed.output_text == whole.output_text == "Look: "


async def test_a_round_trip_of_a_call(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    """The items of an answer are sent back as they came; they make one message of the assistant."""
    script(cluster, tokenizer, ANSWER)
    asked: list[Any] = [{"role": "developer", "content": "Rule"}, {"role": "user", "content": "Q"}]
    reply = await client.responses.create(model="fake", input=asked, tools=TOOLS, max_output_tokens=500)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"result {number}"}
        for number, item in enumerate(reply.output[2:])  # type: ignore[union-attr]
    ]
    script(cluster, tokenizer, "Done")
    conversation: Any = [*asked, *reply.output, *results]
    final = await client.responses.create(model="fake", input=conversation, tools=TOOLS)
    assert final.output_text == "Done"
    text = prompt_text(cluster, tokenizer)
    turns = [turn.partition("\n")[::2] for turn in text.replace("<|im_end|>\n", "").split("<|im_start|>")[1:]]
    assert turns == [
        ("system", "Rule"),
        ("user", "Q"),
        ("assistant", "Look: "),
        ("tool", "result 0"),
        ("tool", "result 1"),
        ("assistant", ""),
    ]


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "name": "f"}, {"type": "allowed_tools", "mode": "required",
     "tools": [{"type": "function", "name": "f"}]}],
)  # fmt: skip
async def test_a_forced_call(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer, choice: Any) -> None:
    script(cluster, tokenizer, FORCED)
    reply = await client.responses.create(**BODY, tools=TOOLS, tool_choice=choice, max_output_tokens=200)
    (call,) = reply.output
    assert (call.name, json.loads(call.arguments)) == ("f", {"city": "Köln"})  # type: ignore[union-attr]
    offered = {name: {"type": "object"} for name in ("fg" if choice == "required" else "f")}
    assert {reservation.sampling.grammar for worker in cluster.workers for reservation in worker.reservations} == {
        of_tool_calls(offered)
    }


NAMESPACE = {"type": "namespace", "name": "mcp", "description": "N", "tools": [*TOOLS, {"type": "custom", "name": "c"}]}
OTHERS = [{"type": "web_search", "external_web_access": False}, NAMESPACE]


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_tools_that_the_server_cannot_run_are_left_out_and_named(
    cluster: Cluster, http: httpx.AsyncClient, choice: str
) -> None:
    body = {**BODY, "tools": [*TOOLS, *OTHERS], "tool_choice": choice}
    reply = await http.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-tandem-ignored"] == "tools[web_search], tools[custom]"
    assert [tool["type"] for tool in reply.json()["tools"]] == ["function", "function", "namespace"]
    call = parse_response(json.dumps(body).encode(), EventTime.now(LifecycleEvent.RECEIVED))
    tools: Any = call.request.prompt.tools.tools  # type: ignore[union-attr]
    assert [(tool["function"]["name"], tool["function"]["description"]) for tool in tools] == [
        ("f", "d"),
        ("g", "d"),
        ("mcp__f", "N\n\nd"),
        ("mcp__g", "d"),
    ]


async def test_a_call_of_a_function_in_a_namespace_goes_to_and_fro(
    cluster: Cluster, client: openai.AsyncOpenAI, http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    script(cluster, tokenizer, f'<tool_call>{{"name": "mcp__f", "arguments": {ARGUMENTS}}}</tool_call>')
    asked: Any = {**BODY, "tools": OTHERS, "max_output_tokens": 200}
    (call,) = (await client.responses.create(**asked)).output
    assert call.type == "function_call"
    assert (call.namespace, call.name, call.arguments) == ("mcp", "f", ARGUMENTS)
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    (added,) = (event for event in events if event.type == "response.output_item.added")
    assert (added.item.namespace, added.item.name) == ("mcp", "f")  # type: ignore[union-attr]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
    items = [call.model_dump(exclude_none=True), result]
    body = {**asked, "input": [{"role": "user", "content": "a"}, *items]}
    parsed: Any = parse_response(json.dumps(body).encode(), EventTime.now(LifecycleEvent.RECEIVED)).request.prompt
    assert parsed.turns[1].extras["tool_calls"][0]["function"]["name"] == parsed.turns[2].extras["name"] == "mcp__f"
    assert (await http.post("/v1/responses", json=body)).status_code == 200


async def test_a_forced_call_beside_a_format_of_the_text(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    """The format is that of a text, which the answer does not have."""
    script(cluster, tokenizer, FORCED)
    text: Any = {"format": {"type": "json_schema", "name": "f", "schema": {"type": "object"}, "strict": True}}
    choice: Any = {"type": "function", "name": "f"}
    (call,) = (
        await client.responses.create(**BODY, tools=TOOLS, tool_choice=choice, text=text, max_output_tokens=200)
    ).output
    assert (call.type, json.loads(call.arguments)) == ("function_call", {"city": "Köln"})
    assert cluster.decode.reservations[-1].sampling.grammar == of_tool_calls({"f": {"type": "object"}})


class _Pair(pydantic.BaseModel):
    a: int
    b: int


async def test_a_format(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    script(cluster, tokenizer, '{"a": 1, "b": 2}')
    reply = await client.responses.parse(**BODY, text_format=_Pair, max_output_tokens=100)
    assert reply.output_parsed == _Pair(a=1, b=2)
    assert cluster.decode.reservations[-1].sampling.grammar
    reply = await client.responses.create(**BODY, text={"format": {"type": "json_object"}}, max_output_tokens=100)
    assert json.loads(reply.output_text) == {"a": 1, "b": 2}


async def test_a_failed_answer(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    cluster.prefill.switches.prefill_error = Internal("a defect")
    with pytest.raises(openai.InternalServerError):
        await client.responses.create(**BODY)
    events = [event async for event in await client.responses.create(**BODY, stream=True)]
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1].response.error.code == "server_error"  # type: ignore[union-attr]
    cluster.prefill.switches.prefill_error = None
    assert (await client.responses.create(**BODY)).output_text


async def test_a_client_that_leaves_aborts_its_answer(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    cluster.decode.switches.held_at = 2
    stream = await client.responses.create(**BODY, stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await until(lambda: not cluster.router._dispatcher._live, "its answer is aborted")
    cluster.decode.go.set()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": 3}, "input"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": "a\0"}, "input.content"),
    ({"input": [{"role": "user", "content": "a"}, {"role": "user", "content": "a\0"}]}, "input[1].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": "a"}] * 5000}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "5"}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"n": 2}, "n"),
    ({"logit_bias": {"5": 3}}, "logit_bias"),
    ({"guided_regex": "a"}, "guided_regex"),
    ({"stop": "a"}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"tools": [*TOOLS, {"type": "web_search"}], "tool_choice": "required"}, "tools[2].type"),
    ({"tools": [{"name": "f"}]}, "tools[0]"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [TOOLS[0]]}, {**TOOLS[0], "name": "n__f"}]},
     "tools[1].name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "h"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "x"}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}}, "text.format.schema"),
    ({"kv_transfer_params": {}}, "kv_transfer_params"),
]  # fmt: skip


async def test_bad_fields_are_named_and_lose_nothing(cluster: Cluster, http: httpx.AsyncClient) -> None:
    for fields, param in BAD:
        for stream in (False, True):
            reply = await http.post("/v1/responses", json={**BODY, **fields, "stream": stream})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    for body in (b"", b"[]", b'{"input": "\xff"}', b"{" * 5000, b'{"input": "a", "tools": [NaN]}'):
        reply = await http.post("/v1/responses", content=body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] in ("body", "tools[0]")
    assert (await http.post("/v1/responses", json=BODY)).status_code == 200


async def test_fields_without_effect_and_unknown_ones(cluster: Cluster, http: httpx.AsyncClient) -> None:
    inert = {
        "user": "me",
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "truncation": "disabled",
        "background": False,
        "previous_response_id": None,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "stream_options": {"include_obfuscation": False},
        "n": 1,
        "logprobs": False,
        "add_generation_prompt": True,
    }
    reply = await http.post("/v1/responses", json=BODY | inert)
    assert reply.status_code == 200, reply.text
    assert "x-tandem-ignored" not in reply.headers
    assert reply.json()["reasoning"] == {"effort": "low", "summary": None}
    assert reply.headers["x-request-id"] == reply.json()["id"]
    items = [{"role": "user", "content": [{"type": "input_text", "text": "a", "zip": 1}]}]
    reply = await http.post("/v1/responses", json=BODY | {"input": items, "zap": 2})
    assert set(reply.headers["x-tandem-ignored"].split(", ")) == {"zap", "input[].content[].zip"}


class TestStrict:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"strict_requests": True, "listeners": ListenerLimits(max_request_bytes=50_000)}

    async def test_unknown_fields_and_large_bodies_are_refused(self, cluster: Cluster, http: httpx.AsyncClient) -> None:
        reply = await http.post("/v1/responses", json={**BODY, "text": {"zap": 1}})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "text.zap")
        reply = await http.post("/v1/responses", json={**BODY, "tools": OTHERS})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools[0].type")
        reply = await http.post("/v1/responses", json={**BODY, "input": "a" * 60_000})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "request")
