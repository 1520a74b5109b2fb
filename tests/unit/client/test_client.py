"""Both clients over a router with fake workers: answers, streams, formats, and errors."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.text.tokenizer import Tokenizer
from tandem.client import (
    Answer,
    AsyncClient,
    Client,
    ContextLengthExceeded,
    DeadlineExceeded,
    FinishReason,
    InvalidArgument,
    Message,
    NotFound,
    ResourceExhausted,
    Tool,
    ToolCall,
    Unauthenticated,
    Unavailable,
    generate_request,
)
from tandem.client.requests import FORMATS, GenerateOptions, Options
from tandem.protocol.generate import ROOT
from tandem.protocol.generated.tandem.v1 import inference_pb2
from tandem.tokenizers.grammars import of_choices, of_json_schema, of_regex
from tests.unit.router.api.test_tool_calls import ANSWER, ARGUMENTS, script
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import until

TOOLS = [Tool("f", "d", {"type": "object"}), Tool("g")]


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "default_max_tokens": 500, "rpc_timeout_s": 2.0}


class Talker:
    """Calls either client by the same methods."""

    def __init__(self, client: Client | AsyncClient) -> None:
        self.client = client

    async def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        if isinstance(self.client, Client):
            return await asyncio.to_thread(getattr(self.client, name), *arguments, **options)
        return await getattr(self.client, name)(*arguments, **options)

    async def streamed(self, name: str, *arguments: Any, chunks: int | None = None, **options: Any) -> tuple[Any, Any]:
        """Returns the chunks of a stream, of which it reads at most so many, and the answers."""
        if isinstance(self.client, AsyncClient):
            chunk_list = []
            async with getattr(self.client, name)(*arguments, **options) as stream:
                async for chunk in stream:
                    chunk_list.append(chunk)
                    if len(chunk_list) == chunks:
                        return chunk_list, None
                return chunk_list, await stream.answers()

        def read() -> tuple[Any, Any]:
            chunk_list = []
            with getattr(self.client, name)(*arguments, **options) as stream:
                for chunk in stream:
                    chunk_list.append(chunk)
                    if len(chunk_list) == chunks:
                        return chunk_list, None
                return chunk_list, stream.answers()

        return await asyncio.to_thread(read)


@asynccontextmanager
async def open_client(kind: type[Client | AsyncClient], address: str, **settings: Any) -> AsyncIterator[Talker]:
    client = kind(address, **settings)
    try:
        yield Talker(client)
    finally:
        await client.close() if isinstance(client, AsyncClient) else client.close()


@pytest.fixture(params=[Client, AsyncClient])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
async def talker(cluster: Cluster, kind: Any) -> AsyncIterator[Talker]:
    async with open_client(kind, cluster.endpoints.grpc_address) as talker:
        yield talker


async def test_a_conversation_with_tools(cluster: Cluster, talker: Talker, tokenizer: Tokenizer) -> None:
    count = script(cluster, tokenizer, ANSWER)
    asked = Message("user", "Hello")
    answer: Answer = await talker.call("chat", [asked], tools=TOOLS, max_tokens=500, logprobs=1)
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("Look: ", "Hm.", FinishReason.TOOL_CALLS)
    calls = [(call.name, call.arguments) for call in answer.tool_calls]
    assert calls == [("f", ARGUMENTS), ("g", "{}")]
    assert len(answer.token_ids) == len(answer.logprobs) == answer.completion_tokens == count + 1
    assert (len(answer.logprobs[0].top), answer.logprobs[0].chosen.token_id) == (1, answer.token_ids[0])
    assert answer.timeline.prefill_worker == "prefill-0"
    result = Message("tool", "sunny", tool_call_id=answer.tool_calls[0].id, name="f")
    again = await talker.call("chat", [asked, answer.message, result], tools=TOOLS, max_tokens=500)
    assert again.prompt_tokens > answer.prompt_tokens
    one = await talker.call("chat", "Hello", tools=TOOLS, parallel_tool_calls=False, max_tokens=500)
    assert [call.name for call in one.tool_calls] == ["f"]
    script(cluster, tokenizer, '{"name": "g", "parameters": {}}')
    for choice in ("required", TOOLS[1]):
        forced = await talker.call("chat", "Hello", tools=TOOLS, tool_choice=choice, max_tokens=500)
        assert [(call.name, call.arguments) for call in forced.tool_calls] == [("g", "{}")]
    none = await talker.call("chat", "Hello", tools=TOOLS, tool_choice="none", max_tokens=500)
    assert (none.tool_calls, none.finish_reason) == ([], FinishReason.STOP)


async def test_chunks_are_the_answers(cluster: Cluster, talker: Talker, tokenizer: Tokenizer) -> None:
    script(cluster, tokenizer, ANSWER)
    chunks, answers = await talker.streamed("stream_chat", "Hello", tools=TOOLS, n=2, max_tokens=500)
    assert len(answers) == 2
    for answer in answers:
        mine = [chunk for chunk in chunks if chunk.index == answer.index]
        assert "".join(chunk.text for chunk in mine) == answer.text == "Look: "
        assert "".join(chunk.reasoning for chunk in mine) == answer.reasoning == "Hm."
        assert [token for chunk in mine for token in chunk.token_ids] == answer.token_ids
        arguments = [part.arguments for chunk in mine for part in chunk.tool_calls if part.index == 0]
        assert "".join(arguments) == answer.tool_calls[0].arguments == ARGUMENTS


async def test_a_built_request_may_be_sent_repeatedly_with_own_deadlines(cluster: Cluster, talker: Talker) -> None:
    request = generate_request([72, 105], max_tokens=4, ignore_eos=True)
    answers = [await talker.streamed("stream", request) for _ in range(2)]
    assert [answer.completion_tokens for _, (answer,) in answers] == [4, 4]
    for worker in cluster.workers:
        worker.switches.mute_after = 1
    with pytest.raises(DeadlineExceeded):
        await talker.streamed("stream", request, timeout_s=0.2)


async def test_chunks_have_the_times_at_which_they_arrived(talker: Talker) -> None:
    began_s = time.monotonic()
    chunks, _ = await talker.streamed("stream_generate", "Hello", max_tokens=5, ignore_eos=True)
    times = [began_s, *(chunk.received_s for chunk in chunks), time.monotonic()]
    assert times == sorted(times)


async def test_a_prompt_is_text_or_tokens(cluster: Cluster, talker: Talker, tokenizer: Tokenizer) -> None:
    script(cluster, tokenizer, "one two three")
    text: Answer = await talker.call("generate", "Hello", max_tokens=100, seed=2**64 - 1, stop=" three")
    assert (text.text, text.matched_stop, text.finish_reason) == ("one two", " three", FinishReason.STOP)
    tokens: Answer = await talker.call("generate", [5, 6, 7], max_tokens=1, model="fake", request_id="mine")
    assert (tokens.prompt_tokens, tokens.finish_reason, tokens.request_id) == (3, FinishReason.LENGTH, "mine")
    assert cluster.prefill.prefills[-1].prompt_token_ids == (5, 6, 7)
    assert (await talker.call("model")).model == "fake"


async def test_prompts_are_scored_cut_and_continued(cluster: Cluster, talker: Talker, tokenizer: Tokenizer) -> None:
    answer: Answer = await talker.call(
        "generate", [5, 6, 7, 8], max_tokens=2, truncate_prompt_tokens=3, prompt_logprobs=2, logit_bias={7: -1.5}
    )
    assert [score.chosen.token_id for score in answer.prompt.logprobs] == [6, 7, 8]
    assert [len(score.top) for score in answer.prompt.logprobs] == [0, 2, 2]
    assert cluster.prefill.prefills[-1].sampling.logit_bias == ((7, -1.5),)
    conversation = [Message("user", "Hi"), Message("assistant", "Well, ")]
    await talker.call("chat", conversation, max_tokens=2, continue_final_message=True)
    prompt = tokenizer.decode_all(cluster.prefill.prefills[-1].prompt_token_ids)
    assert prompt.endswith("<|im_start|>assistant\nWell, ")
    await talker.call("chat", conversation[:1], max_tokens=2, add_generation_prompt=False)
    prompt = tokenizer.decode_all(cluster.prefill.prefills[-1].prompt_token_ids)
    assert prompt.endswith("Hi<|im_end|>\n")


async def test_several_prompts_have_their_own_answers(talker: Talker, tokenizer: Tokenizer) -> None:
    prompts = ["The quick", [5, 6, 7]]
    options = {"max_tokens": 3, "n": 2, "echo": True, "return_token_ids": True}
    answers = await talker.call("generate_all", prompts, **options)
    ids = [tokenizer.encode("The quick"), [5, 6, 7]]
    assert [answer.index for answer in answers] == [0, 1, 2, 3]
    assert [answer.prompt.token_ids for answer in answers] == [token_ids for token_ids in ids for _ in range(2)]
    assert [answer.prompt.text for answer in answers] == [
        tokenizer.decode(token_ids) for token_ids in ids for _ in range(2)
    ]
    assert [answer.text for answer in await talker.call("generate_all", prompts[0], max_tokens=3)] == [answers[0].text]
    best = await talker.call("generate_all", prompts, max_tokens=3, best_of=2)
    assert [(answer.index, answer.completion_tokens) for answer in best] == [(0, 3), (1, 3)]


async def test_token_ids_there_and_back(talker: Talker, tokenizer: Tokenizer) -> None:
    tokens = await talker.call("tokenize", " fox", token_strs=True)
    assert (tokens.token_ids, tokens.token_strs) == (tokenizer.encode(" fox"), ["Ġfox"][: len(tokens.token_ids)])
    assert await talker.call("detokenize", tokens.token_ids, model="fake") == " fox"
    chat = await talker.call("tokenize_chat", "Hi", add_generation_prompt=False)
    assert tokenizer.decode_all(chat.token_ids) == "<|im_start|>user\nHi<|im_end|>\n"
    assert (chat.token_strs, chat.max_context) == ([], 2048)
    assert (await talker.call("tokenizer_info"))["eos_token"] == "<|im_end|>"
    with pytest.raises(InvalidArgument, match="token_ids"):
        await talker.call("detokenize", [-1])


async def test_answers_follow_a_format(cluster: Cluster, talker: Talker) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for options, grammar in (
        ({"json_schema": schema}, of_json_schema(schema)),
        ({"json_schema": json.dumps(schema)}, of_json_schema(schema)),
        ({"regex": "a+"}, of_regex("a+")),
        ({"choice": ["yes", "no"]}, of_choices(["yes", "no"])),
    ):
        await talker.call("generate", "Hello", max_tokens=2, **options)
        assert cluster.prefill.prefills[-1].sampling.grammar == grammar


@pytest.mark.parametrize("leave", ["close", "abort"])
async def test_a_request_is_cancelled(cluster: Cluster, talker: Talker, leave: str) -> None:
    for worker in cluster.workers:
        worker.switches.mute_after = 3
    if leave == "close":
        chunks, _ = await talker.streamed("stream_generate", "Hello", chunks=1, max_tokens=20)
        assert chunks[0].token_ids
    else:
        running = asyncio.create_task(talker.call("generate", "Hello", request_id="mine", max_tokens=20))
        await until(lambda: cluster.prefill.prefills, "the request runs")
        assert await talker.call("abort", "mine")
        assert (await running).finish_reason is FinishReason.ABORT
        assert not await talker.call("abort", "mine")
    await cluster.settled()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"nonsense": 1}, "nonsense"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"regex": "a", "choice": ["b"]}, "choice"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema"),
        ({"regex": "("}, "response_format.regex"),
        ({"tools": [Tool("")]}, "tools[0].name"),
        ({"tools": [Tool("f", parameters={"a": b""})]}, "tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"conversation": [Message("assistant", tool_calls=[ToolCall("", "f", "")])]}, "messages[0].tool_calls[0].id"),
        ({"conversation": []}, "messages"),
    ],
)
async def test_a_wrong_argument_is_named(talker: Talker, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await talker.call("chat", **{"conversation": "Hello", **options})
    assert caught.value.field == field


async def test_errors_are_typed(cluster: Cluster, talker: Talker, kind: Any) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"^This model's maximum context length is"):
        await talker.call("generate", [5] * 100_000)
    with pytest.raises(NotFound, match="is not served here"):
        await talker.call("chat", "Hello", model="other")
    for worker in cluster.workers:
        worker.switches.silent_prefill = worker.switches.silent_reserve = True
    async with open_client(kind, cluster.endpoints.grpc_address, timeout_s=0.5) as hurried:
        with pytest.raises(DeadlineExceeded):
            await hurried.call("generate", "Hello")
    await cluster.controller.set(cluster.decode)
    await until(lambda: not cluster.router.ready, "not ready")
    with pytest.raises(Unavailable) as caught:
        await talker.call("generate", "Hello")
    assert caught.value.retry_after_s > 0
    await cluster.router.stop(0.0)
    with pytest.raises(Unavailable, match="cannot reach the router at"):
        await talker.call("model")


class TestFull:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"max_queued_requests": 1, "retry_after_s": 3.0}

    async def test_a_full_queue_says_when_to_try_again(self, cluster: Cluster, talker: Talker) -> None:
        for worker in cluster.workers:
            worker.switches.refuse_reserve = 1 << 30
        waiting = asyncio.create_task(talker.call("generate", "Hello", request_id="first"))
        await until(lambda: cluster.router._dispatcher.waiting, "the queue is full")
        with pytest.raises(ResourceExhausted) as caught:
            await talker.call("generate", "Hello")
        assert caught.value.retry_after_s == 3.0
        await talker.call("abort", "first")
        await waiting


class TestKeys:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_keys": ("sesame",)}

    async def test_the_key_is_sent(self, cluster: Cluster, kind: Any) -> None:
        address = cluster.endpoints.grpc_address
        for key, problem in (("", "asks .* key; give api_key"), ("other", "does not accept .*; give another api_key")):
            async with open_client(kind, address, api_key=key) as talker:
                with pytest.raises(Unauthenticated, match=problem):
                    await talker.call("generate", "Hello")
        async with open_client(kind, address, api_key="sesame") as talker:
            assert (await talker.call("generate", "Hello", max_tokens=2)).completion_tokens == 2
        with pytest.raises(InvalidArgument, match="api_key"):
            kind(address, api_key="with space")


async def test_the_examples_run(cluster: Cluster, tokenizer: Tokenizer) -> None:
    script(cluster, tokenizer, ANSWER)
    page = (ROOT / "docs" / "client.md").read_text().replace("127.0.0.1:50051", cluster.endpoints.grpc_address)
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 4
    looked_up: list[str] = []

    def look_up(name: str, arguments: Any) -> str:
        looked_up.append(name)
        return json.dumps(arguments)

    def run() -> None:
        given: dict[str, Any] = {"look_up": look_up, "json": json}
        for example in examples:
            with Client(cluster.endpoints.grpc_address) as given["client"]:
                exec(example, given)

    await asyncio.to_thread(run)
    assert looked_up == ["f", "g"]


def test_every_option_of_the_schema_has_an_argument() -> None:
    fields = {field.name for field in inference_pb2.GenerationOptions.DESCRIPTOR.fields}
    formats = {field.name for field in inference_pb2.ResponseFormat.DESCRIPTOR.fields}
    assert formats == {*FORMATS}
    assert Options.__annotations__.keys() == fields - {"response_format"} | formats | {"model", "request_id"}
    own = {field.name for field in inference_pb2.GenerateRequest.DESCRIPTOR.fields}
    own -= {"options", "text", "token_ids", "prompts"}
    assert own == GenerateOptions.__annotations__.keys() - Options.__annotations__.keys() | {"model", "request_id"}
