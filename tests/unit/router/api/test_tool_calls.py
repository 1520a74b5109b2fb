"""Tool calls and reasoning over HTTP: fake workers generate a scripted text, the official client reads it."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest

from router.text.tokenizer import Tokenizer
from tandem.tokenizers.grammars import of_tool_calls
from tests.unit.router.conftest import Cluster

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in "fg"
]
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
ARGUMENTS = '{"city": "Köln", "days": [1, 2]}'
ANSWER = (
    "<think>Hm.</think>\n\nLook: "
    f'<tool_call>{{"name": "f", "arguments": {ARGUMENTS}}}</tool_call>'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{cluster.endpoints.http_address}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def script(cluster: Cluster, tokenizer: Tokenizer, text: str) -> int:
    """Lets the fakes answer `text`, with an end of sequence; returns its tokens."""
    ids = tokenizer.encode(text)

    def answer(_prompt: Sequence[int], index: int) -> int:
        return ids[min(index, len(ids) - 1)]

    for worker in cluster.workers:
        worker.answer = answer
        worker.switches.stop_at = len(ids)
    return len(ids)


async def test_a_whole_answer(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    count = script(cluster, tokenizer, ANSWER)
    reply = await client.chat.completions.create(
        model="fake", messages=MESSAGES, tools=TOOLS, max_tokens=500, n=2, logprobs=True
    )
    for choice in reply.choices:
        message = choice.message
        assert (message.content, message.model_extra["reasoning_content"]) == ("Look: ", "Hm.")  # type: ignore[index]
        first, second = message.tool_calls or ()
        assert (first.function.name, first.function.arguments) == ("f", ARGUMENTS)  # type: ignore[union-attr]
        assert (second.function.name, second.function.arguments) == ("g", "{}")  # type: ignore[union-attr]
        assert first.id.startswith("call_")
        assert first.id != second.id
        assert choice.finish_reason == "tool_calls"
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or ()) == count + 1
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 2 * (count + 1)


async def test_a_stream(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    count = script(cluster, tokenizer, ANSWER)
    content, thought, calls, finish, usage, scores = "", "", dict[int, list[str]](), None, None, 0
    async with client.chat.completions.stream(
        model="fake",
        messages=MESSAGES,
        tools=TOOLS,
        max_tokens=500,
        logprobs=True,
        stream_options={"include_usage": True},
    ) as stream:
        async for event in stream:
            if event.type != "chunk":
                continue
            usage = event.chunk.usage or usage
            for choice in event.chunk.choices:
                content += choice.delta.content or ""
                thought += (choice.delta.model_extra or {}).get("reasoning_content") or ""
                finish = choice.finish_reason or finish
                scores += len((choice.logprobs.content if choice.logprobs else None) or ())
                for call in choice.delta.tool_calls or ():
                    assert call.function is not None
                    if call.index not in calls:
                        assert call.id
                        assert call.function.name
                        calls[call.index] = [call.function.name, ""]
                    calls[call.index][1] += call.function.arguments or ""
        final = await stream.get_final_completion()
    assert (content, thought, finish) == ("Look: ", "Hm.", "tool_calls")
    assert calls == {0: ["f", ARGUMENTS], 1: ["g", "{}"]}
    made = final.choices[0].message.tool_calls or ()
    assert [(call.function.name, call.function.arguments) for call in made] == [("f", ARGUMENTS), ("g", "{}")]
    assert usage is not None
    assert usage.completion_tokens == scores == count + 1


async def test_one_call_and_an_answer_that_is_cut(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    count = script(cluster, tokenizer, ANSWER)
    reply = await client.chat.completions.create(
        model="fake", messages=MESSAGES, tools=TOOLS, max_tokens=500, parallel_tool_calls=False
    )
    assert len(reply.choices[0].message.tool_calls or ()) == 1
    for worker in cluster.workers:
        worker.switches.stop_at = None
    cut = await client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS, max_tokens=count - 2)
    assert cut.choices[0].finish_reason == "length"
    stopped = await client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS, stop="</tool_call>")
    assert len(stopped.choices[0].message.tool_calls or ()) <= 1


async def test_without_tools_calls_are_text(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    script(cluster, tokenizer, ANSWER)
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        reply = await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=500, **more)  # type: ignore[call-overload]
        assert reply.choices[0].message.tool_calls is None
        assert reply.choices[0].message.content.startswith("Look: <tool_call>")
        assert reply.choices[0].finish_reason == "stop"


FORCED = '{"name": "f", "parameters": {"city": "Köln"}}'


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_forced_call_follows_its_grammar(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer, choice: Any, stream: bool
) -> None:
    """Also for a model whose own form of calls is another: workers get the grammar, and its form is parsed."""
    script(cluster, tokenizer, FORCED)
    asked: Any = {"model": "fake", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    if stream:
        async with client.chat.completions.stream(**asked) as events:
            reply = await events.get_final_completion()
    else:
        reply = await client.chat.completions.create(**asked)
    (call,) = reply.choices[0].message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"city": "Köln"})
    assert reply.choices[0].finish_reason == "tool_calls"
    assert not reply.choices[0].message.content
    offered = {"f": {"type": "object"}} if isinstance(choice, dict) else {name: {"type": "object"} for name in "fg"}
    grammars = {reservation.sampling.grammar for worker in cluster.workers for reservation in worker.reservations}
    assert grammars == {of_tool_calls(offered)}


async def test_the_stream_of_a_forced_call_begins_without_content(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    """Content is null and not an empty text, as in OpenAI's streams; other streams begin with an empty text."""

    async def first_content(**fields: Any) -> str | None:
        stream = await client.chat.completions.create(
            model="fake", messages=MESSAGES, tools=TOOLS, max_tokens=200, stream=True, **fields
        )
        first, *_ = [chunk async for chunk in stream]
        delta = first.choices[0].delta
        assert delta.role == "assistant"
        return delta.content  # type: ignore[no-any-return]

    script(cluster, tokenizer, FORCED)
    assert await first_content(tool_choice="required") is None
    assert not await first_content()
    assert await first_content() is not None


async def test_a_forced_call_beside_a_response_format(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    script(cluster, tokenizer, FORCED)
    named: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    for wanted in (named, {"type": "json_object"}):
        reply = await client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice="required",
            max_tokens=200,
            response_format=wanted,
        )
        (call,) = reply.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name == "f"


BAD_TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"uniqueItems": True}}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [3]}, "tools[0]"),
    ({"tools": [{"type": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "\0"}}]}, "tools"),
    ({"tools": TOOLS, "tool_choice": "x"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "extra_body": {"guided_regex": "a"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "extra_body": {"ignore_eos": True}}, "ignore_eos"),
    ({"tools": [BAD_TOOL], "tool_choice": "required"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}},
        "tool_choice.function.name",
    ),
    ({"messages": [*MESSAGES, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "function", "id": "1"}]}]},
     "messages[0].tool_calls[0].function.name"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_bad_fields_are_named(
    cluster: Cluster, client: openai.AsyncOpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**{"model": "fake", "messages": MESSAGES, **fields})
    assert caught.value.param == param


class TestUnknownForm:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {}

    async def test_tools_are_refused(self, cluster: Cluster, client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            await client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS)


class TestReasoningModel:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"reasoning_parser": "deepseek_r1"}

    async def test_an_answer_with_a_format_is_content(
        self, cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
    ) -> None:
        """The grammar begins with the first token, so that the answer has no reasoning."""
        script(cluster, tokenizer, '{"a": 1}')
        asked: Any = {"model": "fake", "messages": MESSAGES, "max_tokens": 100}
        plain = await client.chat.completions.create(**asked)
        assert not plain.choices[0].message.content
        reply = await client.chat.completions.create(**asked, response_format={"type": "json_object"})
        assert reply.choices[0].message.content == '{"a": 1}'


def test_the_template_gets_tools_and_calls(tokenizer: Tokenizer) -> None:
    from router.api.openai.requests import parse_chat
    from router.text.chat_template import ChatTemplate
    from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent

    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "<b>"},
    ]
    body = json.dumps({"messages": messages, "tools": TOOLS}).encode()
    prompt: Any = parse_chat(body, EventTime.now(LifecycleEvent.RECEIVED), strict=True).request.prompt
    source = (
        "{{ tools[1].function.name }} {{ messages[1].tool_calls[0].function.arguments | tojson }} "
        "{{ messages[2].tool_call_id }}"
    )
    assert ChatTemplate(source, {}).render(prompt.turns, {}, prompt.tools.shown) == 'g {"a": 1} call_1'
