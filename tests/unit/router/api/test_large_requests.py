"""A large request delays no other: it is measured first, parsed in a thread, and never tokenized if it cannot fit."""

import asyncio
import json
import random
import re
import string
import threading
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from fastapi import Request
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from router.api.http import read_data
from router.requests import prompts
from router.text import request_reader
from router.text.chat_template import ChatTurn
from router.text.tokenizer import Tokenizer
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.messages import Role
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import FakeWorker, channel_to, until
from tests.unit.router.test_generate import Client, ask, expected

MIB = 1 << 20
EMPTY_MESSAGE = bytes([pb.ChatRequest.DESCRIPTOR.fields_by_name["messages"].number << 3 | 2, 0])


@pytest.fixture
async def channel(cluster: Cluster) -> AsyncIterator[grpc.aio.Channel]:
    async with channel_to(cluster.endpoints.grpc_address) as opened:
        yield opened


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}", timeout=60) as opened:
        yield opened


@pytest.fixture
def read_in(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads in which requests were parsed from protobuf."""
    threads: list[threading.Thread] = []
    decoded = request_reader._decoded

    def noted(kind: Any, data: bytes) -> Any:
        threads.append(threading.current_thread())
        return decoded(kind, data)

    monkeypatch.setattr(request_reader, "_decoded", noted)
    return threads


async def refused(channel: grpc.aio.Channel, method: str, data: bytes) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_stream(f"/tandem.v1.Inference/{method}")(data, timeout=60).read()
    return caught.value


async def test_two_million_empty_messages_are_never_made(
    cluster: Cluster, channel: grpc.aio.Channel, read_in: list[threading.Thread]
) -> None:
    """Parsing the messages would block the event loop for seconds, as long as a lease lives."""
    error = await refused(channel, "Chat", EMPTY_MESSAGE * (2 * MIB - 100))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not read_in
    error = await refused(channel, "Chat", EMPTY_MESSAGE * 5000)
    assert "5000 messages, the limit is 4096" in str(error.details())
    assert (await Client(channel).run(ask(4)))[1]


async def test_a_large_message_is_read_in_a_thread(
    cluster: Cluster, channel: grpc.aio.Channel, read_in: list[threading.Thread]
) -> None:
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * MIB)).SerializeToString()
    error = await refused(channel, "Generate", ids)
    assert "1048576 in the prompt" in str(error.details())
    assert [thread.name.startswith("router-tokenizer") for thread in read_in] == [True]


async def test_what_is_no_message_is_the_client_s_fault(cluster: Cluster, channel: grpc.aio.Channel) -> None:
    for data in (b"\xff", b"\xff" * MIB, b"\x1a\x05a", b"\x0b" * 40_000):
        assert (await refused(channel, "Chat", data)).code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"[]," * (MIB // 3) + b"0]",
        b'{"prompt":[' + b"1.5," * MIB + b"1]}",
        b'{"messages":[' + b"{}," * MIB + b"{}]}",
        b'{"prompt":[' + b'"",' * MIB + b'""]}',
        b"{" + b",".join(b'"%d":0' % number for number in range(300_000)) + b"}",
    ],
    ids=["lists", "floats", "messages", "prompts", "fields"],
)
async def test_a_body_of_many_parts_is_refused_before_it_is_read(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr(json, "loads", None)  # parsing it would fail
    answer = await http.post("/v1/chat/completions", content=body[: 4 * MIB])
    monkeypatch.undo()
    assert answer.status_code == 400
    assert re.search("more than (262144 fields|65536 strings)", answer.json()["error"]["message"])


async def test_messages_are_checked_and_measured_in_a_thread(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the calls in messages were written as text on the event loop, twice."""
    threads: list[str] = []

    def noted(work: Any) -> Any:
        def called(*arguments: Any) -> Any:
            threads.append(threading.current_thread().name)
            return work(*arguments)

        return called

    monkeypatch.setattr(prompts, "_check_turn", noted(prompts._check_turn))
    monkeypatch.setattr(ChatTurn, "__post_init__", noted(ChatTurn.__post_init__))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "b" * 40_000})}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call] * 3}]
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = await http.post(path, json={"messages": messages})
        assert answer.status_code == 200, answer.text
    bad = {"role": "user", "content": "\0"}
    answer = await http.post("/v1/chat/completions", json={"messages": [*messages, bad]})
    assert answer.json()["error"]["param"] == "messages[2].content"
    assert len(threads) >= 6
    assert all(name.startswith("router-tokenizer") for name in threads)


async def test_the_loop_turns_while_a_body_is_read(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    loops, turned = json.loads, threading.Event()
    loop = asyncio.get_running_loop()

    def slow(body: Any) -> Any:
        loop.call_soon_threadsafe(turned.set)
        assert turned.wait(60)  # fails if parsing blocks the event loop
        return loops(body)

    monkeypatch.setattr(json, "loads", slow)
    answer = await http.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}' + b" " * MIB)
    monkeypatch.undo()
    assert answer.status_code == 200


async def test_a_prompt_that_no_context_holds_is_not_tokenized(
    cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing it would take a second of a thread per MiB."""
    monkeypatch.setattr(Tokenizer, "encode", None)
    monkeypatch.setattr(Tokenizer, "encode_rendered", None)
    long = "the quick brown fox " * 50_000
    for path, body in (
        ("completions", {"prompt": long}),
        ("chat/completions", {"messages": [{"role": "user", "content": long}]}),
    ):
        answer = await http.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400
        assert "requested at least" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == ("prompt" if path == "completions" else "messages")


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=200))
def test_no_text_has_fewer_tokens_than_its_bound(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.fewest_tokens(text, 1000) <= len(tokenizer.encode(text))
    rendered = tokenizer.render_chat([ChatTurn("user", text)])
    assert tokenizer.fewest_tokens(rendered, 1000) <= len(tokenizer.encode_rendered(rendered))


def test_a_text_of_short_tokens_is_rejected_by_its_beginning(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound by bytes assumes the longest token of the vocabulary everywhere."""
    encoded: list[int] = []
    encode = tokenizer._encode

    def counting(text: str, *, special: bool) -> list[int]:
        encoded.append(len(text))
        return encode(text, special=special)

    monkeypatch.setattr(tokenizer, "_encode", counting)
    text = "".join(random.Random(1).choices(string.ascii_letters, k=400_000))
    assert tokenizer.fewest_tokens(text, 8192) >= 8192
    assert sum(encoded) < 0.2 * len(text)


@pytest.mark.parametrize("kind", ["http", "grpc"])
async def test_a_client_that_leaves_takes_its_prompt_out_of_the_queue(
    cluster: Cluster, http: httpx.AsyncClient, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    go, pool = threading.Event(), cluster.router._validator._pool
    encode = Tokenizer.encode

    def held(self: Tokenizer, text: str, **options: bool) -> list[int]:
        go.wait(60)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", held)
    client = Client(channel)

    def send() -> asyncio.Task[Any]:
        if kind == "http":
            return asyncio.create_task(http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}))
        return asyncio.create_task(client.run(pb.GenerateRequest(text="a", options=pb.GenerationOptions(max_tokens=2))))

    running = [send() for _ in range(cluster.config.tokenizer_threads)]
    await until(lambda: not pool._idle, "all threads have work")
    waiting = send()
    await until(lambda: pool.waiting == 1, "one waits")
    waiting.cancel()
    await until(lambda: pool.waiting == 0, "it has left")
    go.set()
    await asyncio.gather(*running)


async def test_the_prefill_workers_pages_limit_a_prompt(cluster: Cluster, channel: grpc.aio.Channel) -> None:
    """The prefill worker has two pages of 16 tokens here, the decode worker 512."""
    small = await FakeWorker("prefill-1", Role.PREFILL, pages_total=2, token="secret").start()
    await cluster.members(small, cluster.decode)
    client = Client(channel)
    _, ids, _ = await client.run(ask(4, prompt=[5] * 32))
    assert ids == expected(4, [5] * 32)
    for max_tokens in (1, 4, None):
        error = await client.error(ask(max_tokens, prompt=[5] * 33))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "33 in the prompt" in str(error.details())
    assert len(small.prefills) == 1


@pytest.mark.parametrize("headers", [[], [(b"content-length", str(20 * MIB).encode())]], ids=["chunked", "sized"])
async def test_nothing_is_kept_of_a_body_over_the_limit(headers: list[tuple[bytes, bytes]]) -> None:
    parts = 20

    async def receive() -> dict[str, Any]:
        nonlocal parts
        parts -= 1
        return {"type": "http.request", "body": bytes(MIB), "more_body": parts > 0}

    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument, match=f"{20 * MIB} bytes long, the limit is {4 * MIB}"):
            await read_data(Request({"type": "http", "headers": headers}, receive), 4 * MIB)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert parts == 0  # its client would get a broken pipe instead of the error
    assert peak < (3 if headers else 7) * MIB


async def test_a_body_that_is_far_too_long_is_not_read() -> None:
    async def receive() -> dict[str, Any]:
        raise AssertionError("it is read")

    headers = [(b"content-length", str(1 << 30).encode())]
    with pytest.raises(InvalidArgument, match="the limit is"):
        await read_data(Request({"type": "http", "headers": headers}, receive), 4 * MIB)
