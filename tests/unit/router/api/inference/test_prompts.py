"""Over gRPC: several prompts in one call, the best of several answers, prompts in responses, and the tokenizer."""

import asyncio
import json
from typing import Any

import grpc.aio
import httpx
import pytest

from router.text.tokenizer import Tokenizer
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.generated.tandem.v1 import inference_pb2_grpc, types_pb2
from tests.unit.router.api.completions.test_prompts import TEXTS, answer
from tests.unit.router.conftest import TEMPLATE, Cluster
from tests.unit.router.fake_cluster import answer_logprobs, until

Stub = inference_pb2_grpc.InferenceStub
IDS = [5, 6, 7]


def several(*prompts: Any, **fields: Any) -> pb.GenerateRequest:
    """Returns the request for these texts and token ids; `fields` are those of the request and of its options."""
    own = {name: fields.pop(name) for name in ("echo", "best_of") if name in fields}
    made = [
        pb.Prompt(text=prompt) if isinstance(prompt, str) else pb.Prompt(token_ids={"ids": prompt})
        for prompt in prompts
    ]
    return pb.GenerateRequest(prompts={"prompts": made}, options=pb.GenerationOptions(**fields), **own)


async def read(stub: Stub, request: pb.GenerateRequest) -> tuple[dict[int, str], dict[int, Any], list[Any]]:
    """Returns the text and the end of each answer, and all messages."""
    texts: dict[int, str] = {}
    ends: dict[int, Any] = {}
    messages = [message async for message in stub.Generate(request)]
    for reply in messages:
        if reply.WhichOneof("event") == "chunk":
            assert reply.index not in ends
            texts[reply.index] = texts.get(reply.index, "") + reply.chunk.text
        elif reply.WhichOneof("event") == "complete":
            ends[reply.index] = reply.complete
    return texts, ends, messages


@pytest.mark.parametrize("n", [1, 2])
async def test_answers_are_numbered_by_prompt(stub: Stub, tokenizer: Tokenizer, n: int) -> None:
    prompts = [TEXTS[0], IDS, TEXTS[2]]
    texts, ends, messages = await read(stub, several(*prompts, max_tokens=6, n=n))
    wanted = [answer(tokenizer, prompt, 6) for prompt in prompts for _ in range(n)]
    assert texts == dict(enumerate(wanted))
    assert {end.completion_tokens for end in ends.values()} == {6}
    assert [ends[index].prompt_tokens for index in range(len(ends))] == [
        len(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt) for prompt in prompts for _ in range(n)
    ]
    assert len({message.request_id for message in messages}) == 1
    assert all(message.WhichOneof("event") != "prompt" for message in messages)


async def test_prompts_are_described_before_their_answers(stub: Stub, tokenizer: Tokenizer) -> None:
    request = several(TEXTS[0], IDS, max_tokens=3, n=2, echo=True, logprobs=1, return_token_ids=True)
    _, _, messages = await read(stub, request)
    for number, (text, ids) in enumerate([(TEXTS[0], tokenizer.encode(TEXTS[0])), (tokenizer.decode(IDS), IDS)]):
        mine = [message for message in messages if message.index // 2 == number]
        assert [message.WhichOneof("event") == "prompt" for message in mine] == [True] + [False] * (len(mine) - 1)
        prompt = mine[0].prompt
        assert (mine[0].index, prompt.text, list(prompt.token_ids)) == (number * 2, text, ids)
        assert [token.chosen.token_id for token in prompt.tokens] == ids
        assert prompt.tokens[0].chosen.logprob == 0.0
        wanted = [answer_logprobs(token_id, 1)[0].chosen for token_id in ids[1:]]
        assert [token.chosen.logprob for token in prompt.tokens[1:]] == wanted
        assert {len(token.top) for token in prompt.tokens[1:]} == {1}


async def test_the_token_ids_of_a_conversation(cluster: Cluster, stub: Stub) -> None:
    options = pb.GenerationOptions(max_tokens=2, return_token_ids=True)
    request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Hello there")], options=options)
    first, *_ = [message async for message in stub.Chat(request)]
    assert tuple(first.prompt.token_ids) == cluster.prefill.prefills[-1].prompt_token_ids
    assert (first.prompt.text, len(first.prompt.tokens)) == ("", 0)


async def test_the_echo_alone(cluster: Cluster, stub: Stub) -> None:
    request = pb.GenerateRequest(text=TEXTS[0], echo=True, options=pb.GenerationOptions(max_tokens=0))
    texts, ends, messages = await read(stub, request)
    assert messages[0].prompt.text == TEXTS[0]
    assert "".join(texts.values()) == ""
    assert (ends[0].completion_tokens, ends[0].finish_reason) == (0, types_pb2.FINISH_REASON_LENGTH)
    assert cluster.prefill.prefills[-1].sampling.max_tokens == 1


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_the_best_answers_are_those_of_http(cluster: Cluster, stub: Stub, logprobs: int | None) -> None:
    prompts = [TEXTS[0], TEXTS[1]]
    given = {} if logprobs is None else {"logprobs": logprobs}
    request = several(*prompts, max_tokens=4, n=2, best_of=3, seed=3, temperature=1.0, echo=True, **given)
    texts, ends, messages = await read(stub, request)
    body = {"prompt": prompts, "max_tokens": 4, "n": 2, "best_of": 3, "seed": 3, "temperature": 1.0, **given}
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}/v1", timeout=60) as http:
        choices = (await http.post("/completions", json=body)).json()["choices"]
    assert texts == {choice["index"]: choice["text"] for choice in choices}
    assert list(ends) == [0, 1, 2, 3]
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds == ["prompt", "chunk", "complete", "chunk", "complete"] * 2
    assert [message.prompt.text for message in messages if message.WhichOneof("event") == "prompt"] == prompts
    chunks = [message.chunk for message in messages if message.WhichOneof("event") == "chunk"]
    assert [len(chunk.logprobs) for chunk in chunks] == [0 if logprobs is None else 4] * 4
    assert [len(chunk.token_ids) for chunk in chunks] == [4] * 4


async def test_a_client_that_leaves_ends_all_prompts(cluster: Cluster, stub: Stub) -> None:
    cluster.decode.switches.step_s = 0.01
    call = stub.Generate(several(*TEXTS, max_tokens=500))
    running = asyncio.ensure_future(call.read())
    await until(lambda: len(cluster.decode.tasks) == 3, "all decode")
    call.cancel()
    running.cancel()
    await cluster.settled()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (several(), "prompt: is missing"),
        (several(*["x"] * 129), "has 129 prompts, the limit is 128"),
        (several("x", "y", n=65), "are more than 128"),
        (several("x", ""), "prompt: is empty"),
        (several("x", [10**6]), "contains token id"),
        (several("x", n=2, best_of=1), "best_of: is 1"),
        (several("x", best_of=1000), "best_of: is 1000"),
        (several("x", max_tokens=0), "max_tokens: is 0"),
        (several("x", []), "prompt: is empty"),
    ],
)
async def test_wrong_fields_are_named(stub: Stub, request_: pb.GenerateRequest, message: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(stub, request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (caught.value.details() or "")


async def test_token_ids_are_those_that_are_prefilled(cluster: Cluster, stub: Stub, tokenizer: Tokenizer) -> None:
    text = " fox<|im_end|>"
    reply = await stub.Tokenize(pb.TokenizeRequest(generate={"text": text}, return_token_strs=True))
    assert (list(reply.token_ids), "".join(reply.token_strs)) == (tokenizer.encode(text), "Ġfox<|im_end|>")
    assert reply.max_context == 2048
    back = await stub.Detokenize(pb.DetokenizeRequest(token_ids=reply.token_ids, model="fake"))
    assert back.text == text
    options = pb.GenerationOptions(max_tokens=2, truncate_prompt_tokens=4)
    request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Hello there")], options=options)
    reply = await stub.Tokenize(pb.TokenizeRequest(chat=request))
    assert (len(reply.token_ids), len(reply.token_strs)) == (4, 0)
    _ = [message async for message in stub.Chat(request)]
    assert tuple(reply.token_ids) == cluster.prefill.prefills[-1].prompt_token_ids


async def test_facts_of_the_tokenizer(stub: Stub) -> None:
    info = json.loads((await stub.GetTokenizerInfo(pb.GetTokenizerInfoRequest())).info)
    assert (info["chat_template"], info["eos_token"]) == (TEMPLATE, "<|im_end|>")


@pytest.mark.parametrize(
    ("method", "request_", "code", "message"),
    [
        ("Tokenize", pb.TokenizeRequest(), "INVALID_ARGUMENT", "request: is missing"),
        ("Tokenize", pb.TokenizeRequest(generate={"token_ids": {"ids": [5]}}), "INVALID_ARGUMENT", "one text"),
        ("Tokenize", pb.TokenizeRequest(generate=several("x")), "INVALID_ARGUMENT", "one text"),
        ("Tokenize", pb.TokenizeRequest(generate={}), "INVALID_ARGUMENT", "prompt: is empty"),
        ("Tokenize", pb.TokenizeRequest(chat={}), "INVALID_ARGUMENT", "messages: is empty"),
        ("Tokenize", pb.TokenizeRequest(generate={"text": "x", "model": "other"}), "NOT_FOUND", "other"),
        ("Detokenize", pb.DetokenizeRequest(), "INVALID_ARGUMENT", "token_ids: is empty"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[10**6]), "INVALID_ARGUMENT", "contains token id"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[5] * 2049), "INVALID_ARGUMENT", "the limit is 2048"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[5], model="other"), "NOT_FOUND", "other"),
    ],
)
async def test_wrong_calls_of_the_tokenizer(stub: Stub, method: str, request_: Any, code: str, message: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(stub, method)(request_)
    assert caught.value.code().name == code
    assert message in (caught.value.details() or "")
