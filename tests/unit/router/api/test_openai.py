"""The HTTP listener over fake workers, through the official client and raw requests."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from router.text.tokenizer import Tokenizer
from tandem.protocol.errors import Internal
from tests.unit.router.conftest import WITHOUT_RECOVERY, Cluster
from tests.unit.router.fake_cluster import answer_token, until

MESSAGES: list[Any] = [{"role": "user", "content": "Hello there"}]
CHAT = {"model": "fake", "messages": MESSAGES}
TEXT = {"model": "fake", "prompt": "x"}


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


def answer_text(cluster: Cluster, tokenizer: Tokenizer, count: int) -> str:
    """Returns the text that the fakes generate for the last prompt."""
    prompt = cluster.prefill.prefills[-1].prompt_token_ids
    return tokenizer.decode([answer_token(prompt, index) for index in range(count)])


async def test_chat(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    reply = await client.chat.completions.create(model="fake", messages=MESSAGES, max_completion_tokens=20, seed=1)
    choice = reply.choices[0]
    assert choice.message.content == answer_text(cluster, tokenizer, 20)
    assert (choice.finish_reason, choice.message.role, reply.object) == ("length", "assistant", "chat.completion")
    assert reply.usage is not None
    assert (reply.usage.completion_tokens, reply.usage.total_tokens) == (20, reply.usage.prompt_tokens + 20)


async def test_chat_stream(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    stream = await client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer_text(cluster, tokenizer, 20)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert len({chunk.id for chunk in chunks}) == 1


async def test_completion_of_text_tokens_and_stream(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    prompts: list[Any] = ["The fox", ["The fox"], tokenizer.encode("The fox"), [tokenizer.encode("The fox")]]
    for prompt in prompts:
        reply = await client.completions.create(model="fake", prompt=prompt, max_tokens=9, temperature=0)
        assert reply.choices[0].text == answer_text(cluster, tokenizer, 9)
        assert reply.object == "text_completion"
    assert len({task.prompt_token_ids for task in cluster.prefill.prefills}) == 1
    stream = await client.completions.create(model="fake", prompt="The fox", max_tokens=9, stream=True)
    text = "".join([chunk.choices[0].text or "" async for chunk in stream])
    assert text == answer_text(cluster, tokenizer, 9)


async def test_stop_and_extras(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=40)
    whole = answer_text(cluster, tokenizer, 40)
    reply = await client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=40,
        stop=whole[12:15],
        temperature=0.5,
        extra_body={"top_k": 4, "min_p": 0.1, "ignore_eos": True, "top_p": None},
    )
    assert reply.choices[0].message.content == whole[: whole.index(whole[12:15])]
    assert reply.choices[0].finish_reason == "stop"
    sampling = cluster.prefill.prefills[-1].sampling
    assert (sampling.top_k, sampling.ignore_eos, sampling.temperature) == (4, True, 0.5)


TOO_LONG: list[tuple[str, Any, str, str]] = [
    (
        "completions",
        {**TEXT, "prompt": [5] * 2048},
        "prompt",
        "This model's maximum context length is 2048 tokens. However, you requested 2049 tokens (2048 in the prompt, 1"
        " in the completion). Please reduce the length of the prompt or completion.",
    ),
    (
        "chat/completions",
        {**CHAT, "max_completion_tokens": 10**6},
        "max_completion_tokens",
        "This model's maximum context length is 2048 tokens. However, you requested 1000026 tokens (26 in the messages,"
        " 1000000 in the completion). Please reduce the length of the messages or completion.",
    ),
]


async def test_what_the_context_cannot_hold_is_refused_in_words_that_clients_know(http: httpx.AsyncClient) -> None:
    for path, body, field, message in TOO_LONG:
        reply = await http.post(f"/v1/{path}", json=body)
        assert reply.status_code == 400
        kind = "invalid_request_error"
        wanted = {"message": message, "type": kind, "param": field, "code": "context_length_exceeded"}
        assert reply.json()["error"] == wanted


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["fake"]
    card = (await client.models.retrieve("fake")).model_dump()
    assert (card["owned_by"], card["max_model_len"], card["parent"]) == ("tandem", 2048, None)
    assert (Path(card["root"]) / "tokenizer.json").is_file()
    (permission,) = card["permission"]
    assert (permission["object"], permission["allow_sampling"], permission["allow_fine_tuning"]) == (
        "model_permission",
        True,
        False,
    )
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other/one")


async def test_content_parts_and_developer_role(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
    ]
    await client.chat.completions.create(model="fake", messages=messages, max_tokens=2)
    prompt = tokenizer._inner.decode(cluster.prefill.prefills[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nab<|im_end|>")


BAD: list[tuple[str, Any, str]] = [
    ("chat/completions", {**CHAT, "max_tokens": 0}, "max_tokens"),
    ("chat/completions", {**CHAT, "max_tokens": -1}, "max_tokens"),
    ("chat/completions", {**CHAT, "max_tokens": "5"}, "max_tokens"),
    ("chat/completions", {**CHAT, "max_tokens": 5, "max_completion_tokens": -3}, "max_completion_tokens"),
    ("chat/completions", {**CHAT, "max_tokens": -3, "max_completion_tokens": 5}, "max_tokens"),
    ("chat/completions", {**CHAT, "max_tokens": True}, "max_tokens"),
    ("chat/completions", {**CHAT, "temperature": -1}, "temperature"),
    ("chat/completions", {**CHAT, "temperature": 10**400}, "temperature"),
    ("chat/completions", {**CHAT, "top_p": 0}, "top_p"),
    ("chat/completions", {**CHAT, "top_k": 10**100}, "top_k"),
    ("chat/completions", {**CHAT, "seed": -2}, "seed"),
    ("chat/completions", {**CHAT, "stop": [1]}, "stop"),
    ("chat/completions", {**CHAT, "n": 99}, "n"),
    ("chat/completions", {**CHAT, "logprobs": 3}, "logprobs"),
    ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ("chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tools[0].function.name"),
    ("chat/completions", {**CHAT, "response_format": {"type": "xml"}}, "response_format.type"),
    ("chat/completions", {**CHAT, "presence_penalty": 2.5}, "presence_penalty"),
    ("chat/completions", {**CHAT, "frequency_penalty": "much"}, "frequency_penalty"),
    ("chat/completions", {**CHAT, "frequency_penalty": -2.01}, "frequency_penalty"),
    ("chat/completions", {**CHAT, "repetition_penalty": -1}, "repetition_penalty"),
    ("chat/completions", {**CHAT, "repetition_penalty": 1e-40}, "repetition_penalty"),
    ("chat/completions", {**CHAT, "logit_bias": {"1": 200}}, "logit_bias.1"),
    ("chat/completions", {**CHAT, "logit_bias": {"1": "2"}}, "logit_bias.1"),
    ("chat/completions", {**CHAT, "logit_bias": {"1": 10**400}}, "logit_bias.1"),
    ("chat/completions", {**CHAT, "logit_bias": {"x": 2}}, "logit_bias"),
    ("chat/completions", {**CHAT, "logit_bias": {"1000000": 2}}, "logit_bias"),
    ("chat/completions", {**CHAT, "logit_bias": {str(n): 2 for n in range(1025)}}, "logit_bias"),
    ("chat/completions", {**CHAT, "logit_bias": [2]}, "logit_bias"),
    ("chat/completions", {**CHAT, "prompt_logprobs": 21}, "prompt_logprobs"),
    ("chat/completions", {**CHAT, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("chat/completions", {**CHAT, "best_of": 2}, "best_of"),
    ("chat/completions", {**CHAT, "echo": True}, "echo"),
    ("chat/completions", {**CHAT, "stream_options": {"include_usage": True}}, "stream_options"),
    ("chat/completions", {"model": "fake"}, "messages"),
    ("chat/completions", {"model": "fake", "messages": []}, "messages"),
    ("chat/completions", {"model": "fake", "messages": "hi"}, "messages"),
    ("chat/completions", {"model": "fake", "messages": ["hi"]}, "messages[0]"),
    ("chat/completions", {"model": "fake", "messages": [{"content": "x"}]}, "messages[0].role"),
    ("chat/completions", {"model": "fake", "messages": [{"role": "user"}]}, "messages[0].content"),
    ("chat/completions", {"model": "fake", "messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        "chat/completions",
        {"model": "fake", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
    ("chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ("completions", {"model": "fake"}, "prompt"),
    ("completions", {**TEXT, "prompt": ""}, "prompt"),
    ("completions", {**TEXT, "prompt": []}, "prompt"),
    ("completions", {**TEXT, "prompt": [[]]}, "prompt"),
    ("completions", {**TEXT, "prompt": ["a", ""]}, "prompt"),
    ("completions", {**TEXT, "prompt": ["a", 1]}, "prompt"),
    ("completions", {**TEXT, "prompt": ["a", [1, 10**9]]}, "prompt"),
    ("completions", {**TEXT, "prompt": ["a"] * 129}, "prompt"),
    ("completions", {**TEXT, "prompt": ["a"] * 65, "n": 2}, "prompt"),
    ("completions", {**TEXT, "prompt": [1, 10**9]}, "prompt"),
    ("completions", {**TEXT, "prompt": [-1]}, "prompt"),
    ("completions", {**TEXT, "prompt": [1, True]}, "prompt"),
    ("completions", {**TEXT, "echo": 1}, "echo"),
    ("completions", {**TEXT, "max_tokens": 0}, "max_tokens"),
    ("completions", {**TEXT, "echo": True, "logprobs": 21}, "logprobs"),
    ("completions", {**TEXT, "logprobs": 21}, "logprobs"),
    ("completions", {**TEXT, "logprobs": -1}, "logprobs"),
    ("completions", {**TEXT, "logprobs": True}, "logprobs"),
    ("completions", {**TEXT, "best_of": 2, "n": 3}, "best_of"),
    ("completions", {**TEXT, "best_of": 17}, "best_of"),
    ("completions", {**TEXT, "best_of": 2, "stream": True}, "best_of"),
    ("completions", {**TEXT, "prompt": "x" * 10_000_000}, "request"),
]


async def test_bad_input_names_field_and_next_request_works(
    cluster: Cluster, http: httpx.AsyncClient, client: openai.AsyncOpenAI
) -> None:
    for path, body, field in BAD:
        reply = await http.post(f"/v1/{path}", content=json.dumps(body), headers={"content-type": "application/json"})
        what = json.dumps(body)[:100]
        assert reply.status_code == 400, (what, reply.text)
        error = reply.json()["error"]
        assert (error["param"], error["type"]) == (field, "invalid_request_error"), (what, error)
        assert error["message"].startswith(f"{field}: "), (what, error)
    for body in (b"not json", b"", b"[1]", b"[" * 100_000, b'{"model": "fake", "temperature": NaN', b"\xff\xfe"):
        reply = await http.post("/v1/chat/completions", content=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "body"), body[:20]
    body = json.dumps({**CHAT, "temperature": float("nan")})
    reply = await http.post("/v1/chat/completions", content=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "temperature")
    reply = await http.post("/v1/chat/completions", json={**CHAT, "seed": -2})
    assert reply.json()["error"]["message"] == "seed: is -2, it must be 0 to 18446744073709551615"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert cluster.prefill.prefills == []
    counted = 'tandem_admission_rejections_total{model="fake",reason="invalid",role="router",worker="router"}'
    assert f"{counted} {len(BAD) + 9:.1f}" in (await http.get("/metrics")).text.splitlines()
    assert (await client.chat.completions.create(model="fake", messages=MESSAGES)).choices


async def test_unknown_routes_answer_in_the_same_shape(http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/embeddings")).json()["error"]["code"] == "not_found"
    reply = await http.get("/v1/completions")
    assert (reply.status_code, reply.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_failure_before_the_first_token_has_its_own_status_unless_headers_are_out(
    cluster: Cluster, client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    cluster.prefill.switches.prefill_error = Internal("broken")
    with pytest.raises(openai.InternalServerError) as error:
        await client.chat.completions.create(model="fake", messages=MESSAGES)
    assert error.value.status_code == 500
    reply = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert reply.status_code == 200
    (event,) = reply.text.strip().split("\n\n")
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "internal"
    with pytest.raises(openai.APIError, match="broken"):
        async for _ in await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True):
            pass
    await cluster.controller.set(cluster.prefill)
    await until(lambda: not cluster.router.ready, "not ready")
    with pytest.raises(openai.InternalServerError) as error:
        await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
    assert error.value.status_code == 503
    assert error.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize("settings", [WITHOUT_RECOVERY])
async def test_failure_amid_a_stream_is_an_error_event_and_no_done(
    cluster: Cluster, client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    cluster.decode.switches.break_after = 5
    cluster.decode.switches.step_s = 0.01
    stream = await client.completions.create(model="fake", prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="went away"):
        async for _ in stream:
            pass
    await until(lambda: cluster.router.ready, "the stream is back")
    reply = await http.post("/v1/completions", json={**TEXT, "stream": True})
    assert reply.status_code == 200
    events = reply.text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert "[DONE]" not in reply.text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("silent", [True, False])
async def test_a_client_that_hangs_up_cancels(cluster: Cluster, stream: bool, silent: bool) -> None:
    cluster.decode.switches.step_s = 0.01
    cluster.prefill.switches.silent_prefill = silent
    host, port = cluster.endpoints.http_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({**TEXT, "stream": stream, "max_tokens": 1000}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await until(lambda: bool(cluster.prefill.prefills), "it is placed")
    if stream and not silent:
        await reader.readuntil(b"data: ")
    writer.close()
    await until(lambda: bool(cluster.decode.aborted), "the decode worker was told")
    await cluster.settled()


async def test_probes(cluster: Cluster, http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/ready")).status_code == 200
    await cluster.controller.set(cluster.decode)
    await until(lambda: not cluster.router.ready, "not ready")
    assert (await http.get("/ready")).status_code == 503


async def test_what_scripts_ask_before_they_begin(cluster: Cluster, http: httpx.AsyncClient) -> None:
    assert list((await http.get("/version")).json()) == ["version"]
    for reply in (await http.get("/ping"), await http.post("/ping")):
        assert reply.status_code == 200
    for path in ("/v1/models", "/v1/models/fake", "/version", "/ping", "/health", "/metrics", "/traces"):
        reply = await http.head(path)
        assert (reply.status_code, reply.content) == (200, b""), path
    await cluster.controller.set(cluster.decode)
    await until(lambda: not cluster.router.ready, "not ready")
    for reply in (await http.get("/ping"), await http.post("/ping")):
        assert reply.status_code == 503


PAGE = "https://chat.example.com"


class TestPagesOfOtherOrigins:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_keys": ("sesame",), "allowed_origins": (PAGE,)}

    async def test_their_browsers_ask_without_a_key_and_read_refusals(self, http: httpx.AsyncClient) -> None:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-y"}
        reply = await http.options("/v1/chat/completions", headers=asked | {"origin": PAGE})
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in reply.headers["access-control-allow-headers"]
        for key, status in (("sesame", 404), ("wrong", 401)):
            headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
            reply = await http.post("/v1/chat/completions", json={**CHAT, "model": "gpt"}, headers=headers)
            assert reply.status_code == status
            assert reply.headers["access-control-allow-origin"] == PAGE

    async def test_no_other_page_may_call(self, http: httpx.AsyncClient) -> None:
        asked = {"access-control-request-method": "POST", "origin": "https://evil.example.com"}
        reply = await http.options("/v1/chat/completions", headers=asked)
        assert reply.status_code == 400
        assert "access-control-allow-origin" not in reply.headers


async def test_without_a_setting_no_page_may_call(http: httpx.AsyncClient) -> None:
    for reply in (await http.options("/v1/models", headers={"origin": PAGE}), await http.get("/v1/models")):
        assert not [name for name in reply.headers if name.startswith("access-control")]


class TestKeys:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_keys": ("sesame",)}

    async def test_a_key_is_needed_but_for_probes(
        self, cluster: Cluster, client: openai.AsyncOpenAI, http: httpx.AsyncClient
    ) -> None:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        for path in ("/v1/models", "/v1/nothing", "/cluster", "/nothing"):
            assert (await http.get(path)).status_code == 401
        for header in ("", "Bearer", "sesame", "Basic sesame"):
            assert (await http.get("/v1/models", headers={"authorization": header})).status_code == 401
        assert (await http.get("/health")).status_code == 200
        assert [model.id async for model in client.with_options(api_key="sesame").models.list()] == ["fake"]
