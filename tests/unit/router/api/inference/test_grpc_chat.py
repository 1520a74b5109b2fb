"""Conversations over gRPC: tools, calls and reasoning, as over HTTP."""

import json
from typing import Any

import grpc
import pytest

from router.api.grpc.calls import conversation
from router.api.openai.requests import parse_chat
from router.text.tokenizer import Tokenizer
from tandem.net.rpc import ERROR_CODE
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.generated.tandem.v1 import types_pb2
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.tokenizers.grammars import of_tool_calls
from tests.unit.router.api.test_tool_calls import ANSWER, ARGUMENTS, FORCED, script
from tests.unit.router.conftest import Cluster

TOOLS = [pb.Tool(name=name, description="d", parameters='{"type": "object"}') for name in "fg"]
USER = pb.ChatMessage(role="user", content="Hello")
CALL = pb.ToolCall(id="call_1", name="f", arguments='{"a": 1}')


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


class Answer:
    """The parts of one answer, joined."""

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.tokens: list[int] = []
        self.scores = 0
        self.calls: dict[int, list[str]] = {}
        self.finish = types_pb2.FINISH_REASON_UNSPECIFIED

    def add(self, message: pb.GenerateResponse) -> None:
        if message.HasField("complete"):
            self.finish = message.complete.finish_reason
            return
        self.text += message.chunk.text
        self.reasoning += message.chunk.reasoning
        self.tokens += message.chunk.token_ids
        self.scores += len(message.chunk.logprobs)
        for call in message.chunk.tool_calls:
            if call.index not in self.calls:
                assert call.id
                self.calls[call.index] = [call.name, ""]
            self.calls[call.index][1] += call.arguments


async def answers(stub: Any, **fields: Any) -> list[Answer]:
    options = pb.GenerationOptions(max_tokens=500, n=fields.pop("n", None), logprobs=0)
    by_index: dict[int, Answer] = {}
    async for message in stub.Chat(pb.ChatRequest(messages=[USER], options=options, **fields)):
        by_index.setdefault(message.index, Answer()).add(message)
    return list(by_index.values())


async def test_answers_are_split_into_their_parts(cluster: Cluster, stub: Any, tokenizer: Tokenizer) -> None:
    count = script(cluster, tokenizer, ANSWER)
    for answer in await answers(stub, tools=TOOLS, n=2):
        assert (answer.text, answer.reasoning) == ("Look: ", "Hm.")
        assert answer.calls == {0: ["f", ARGUMENTS], 1: ["g", "{}"]}
        assert answer.finish == types_pb2.FINISH_REASON_TOOL_CALLS
        assert len(answer.tokens) == answer.scores == count + 1
    (one,) = await answers(stub, tools=TOOLS, parallel_tool_calls=False)
    assert one.calls == {0: ["f", ARGUMENTS]}
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (plain,) = await answers(stub, **fields)
        assert (plain.reasoning, plain.calls, plain.finish) == ("Hm.", {}, types_pb2.FINISH_REASON_STOP)
        assert plain.text.startswith("Look: <tool_call>")


@pytest.mark.parametrize("choice", [{"tool_choice": "required"}, {"tool_function": "f"}])
async def test_a_forced_call_follows_its_grammar(
    cluster: Cluster, stub: Any, tokenizer: Tokenizer, choice: dict[str, str]
) -> None:
    script(cluster, tokenizer, FORCED)
    (answer,) = await answers(stub, tools=TOOLS, **choice)
    ((name, arguments),) = answer.calls.values()
    assert (name, json.loads(arguments), answer.text) == ("f", {"city": "Köln"}, "")
    offered = {name: {"type": "object"} for name in ("f" if "tool_function" in choice else "fg")}
    assert cluster.prefill.prefills[-1].sampling.grammar == of_tool_calls(offered)


async def test_a_plain_prompt_is_answered_with_the_models_whole_text(
    cluster: Cluster, stub: Any, tokenizer: Tokenizer
) -> None:
    script(cluster, tokenizer, ANSWER)
    answer = Answer()
    async for message in stub.Generate(pb.GenerateRequest(text="Hi", options=pb.GenerationOptions(max_tokens=500))):
        answer.add(message)
    assert (answer.text, answer.reasoning, answer.calls) == (ANSWER, "", {})


def test_a_conversation_is_the_same_over_both_listeners() -> None:
    messages = [
        pb.ChatMessage(role="developer", content="s"),
        USER,
        pb.ChatMessage(role="assistant", tool_calls=[CALL], reasoning_content="Hm."),
        pb.ChatMessage(role="tool", content="2", tool_call_id="call_1", name="f"),
    ]
    over_grpc = pb.ChatRequest(
        messages=messages, tools=TOOLS, tool_function="g", parallel_tool_calls=False, continue_final_message=True
    )
    function = {"name": "f", "arguments": '{"a": 1}'}
    body = {
        "messages": [
            {"role": "developer", "content": "s"},
            {"role": "user", "content": "Hello"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
                "reasoning_content": "Hm.",
            },
            {"role": "tool", "content": "2", "tool_call_id": "call_1", "name": "f"},
        ],
        "tools": [
            {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
            for name in "fg"
        ],
        "tool_choice": {"type": "function", "function": {"name": "g"}},
        "parallel_tool_calls": False,
        "continue_final_message": True,
    }
    over_http = parse_chat(
        json.dumps(body).encode(), EventTime.now(LifecycleEvent.RECEIVED), strict=True
    ).request.prompt
    assert conversation(over_grpc, {}) == over_http


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [pb.Tool()]}, "tools[0].name"),
        ({"tools": [*TOOLS, pb.Tool(name="h", parameters="{")]}, "tools[2].parameters"),
        ({"tools": [pb.Tool(name="h", parameters="[]")]}, "tools[0].parameters"),
        ({"tools": [pb.Tool(name="h", parameters="[" * 300_000)]}, "tools[0].parameters"),
        ({"tools": [pb.Tool(name="h", parameters="[" * 100_000)]}, "tools[0].parameters"),
        ({"tools": [pb.Tool(name="\0")]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "x"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_function": "h"}, "tool_function"),
        ({"tools": TOOLS, "tool_function": "f", "tool_choice": "auto"}, "tool_function"),
        ({"messages": [pb.ChatMessage(role="tool", content="x")]}, "messages[0].tool_call_id"),
        ({"messages": [pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f")])]},
         "messages[0].tool_calls[0].id"),
        ({"messages": [pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="1")])]},
         "messages[0].tool_calls[0].name"),
        ({"messages": [pb.ChatMessage(role="other")]}, "messages[0].role"),
        ({"chat_template_kwargs": r'{"x": "\ud800"}'}, "chat_template_kwargs"),
    ],
)  # fmt: skip
async def test_bad_fields_are_named(cluster: Cluster, stub: Any, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Chat(pb.ChatRequest(**{"messages": [USER], **fields})):
            pass
    assert (ERROR_CODE, InvalidArgument.code) in tuple(caught.value.trailing_metadata())
    assert (caught.value.details() or "").startswith(f"{named}: ")


class TestUnknownForm:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {}

    async def test_tools_are_refused(self, cluster: Cluster, stub: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match="--tool-call-parser"):
            await answers(stub, tools=TOOLS)
