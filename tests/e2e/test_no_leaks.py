"""Many requests, a third of them cancelled at random moments, leave every page free or in the prefix cache."""

from __future__ import annotations

import asyncio
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tandem.net.rpc import open_client_channel
from tandem.protocol.generated.tandem.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tandem.protocol.lifecycle.events import LifecycleEvent

REQUESTS = 75
AT_ONCE = 24
IN_PREFILL_TRIES = 20
STORMS = 8
LATER_REQUESTS = 45
PROMPTS = 12
"""The number of prompts that requests are drawn from: the shortest, up to 65 tokens."""
ANSWER_TOKENS_MAX = 12
MOMENTS = {
    "queued": {LifecycleEvent.RECEIVED, LifecycleEvent.TOKENIZED},
    "at the prefill worker": {LifecycleEvent.PLACED, LifecycleEvent.RESERVED},
    "between prefill and decode": {
        LifecycleEvent.PREFILL_FINISHED,
        LifecycleEvent.FIRST_TOKEN,
        LifecycleEvent.TRANSFER_STARTED,
        LifecycleEvent.TRANSFER_FINISHED,
    },
    "in decode": {LifecycleEvent.DECODE_ADMITTED, LifecycleEvent.DECODE_STARTED},
}
"""The phase of a request, by the last event that its router has recorded."""
WAYS = {"waiting", "token", "socket", "abort", "req"}
"""Prefixes of the names of cancelled requests; requests of HTTP clients are named req-…."""


def request_of(prompt: tuple[int, ...], tokens: int, request_id: str = "") -> inference_pb2.GenerateRequest:
    """Returns a greedy request; half of the named ones have their own salt, and so no prefix cache hits."""
    salt = request_id if zlib.crc32(request_id.encode()) % 2 else ""
    return inference_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=inference_pb2.TokenIds(ids=prompt),
        options=inference_pb2.GenerationOptions(max_tokens=tokens, temperature=0, ignore_eos=True, cache_salt=salt),
    )


async def to_the_end(stub: Any, prompt: tuple[int, ...], tokens: int) -> str:
    got = [t async for m in stub.Generate(request_of(prompt, tokens), timeout=240) for t in m.chunk.token_ids]
    assert len(got) == tokens
    return "finished"


async def cancel_after_a_while(stub: Any, prompt: tuple[int, ...], tokens: int, rng: random.Random) -> str:
    call = stub.Generate(request_of(prompt, tokens, f"waiting-{rng.random()}"), timeout=240)
    await asyncio.sleep(rng.choice([0, 0.01, 0.1, 0.4, 1.5]) * rng.random())
    call.cancel()
    return "cancelled while waiting"


async def cancel_at_token(stub: Any, prompt: tuple[int, ...], tokens: int, rng: random.Random, wanted: int) -> str:
    """Cancels at token number `wanted`: the first one comes during the KV transfer, a later one in decode."""
    call = stub.Generate(request_of(prompt, tokens, f"token-{rng.random()}"), timeout=240)
    got = 0
    async for message in call:
        got += len(message.chunk.token_ids)
        if got >= wanted:
            call.cancel()
            break
    return "cancelled at a token"


async def close_the_socket(address: str, prompt: tuple[int, ...], tokens: int, rng: random.Random) -> str:
    """Closes the client's connection during the call."""
    channel = open_client_channel(address)
    call = inference_pb2_grpc.InferenceStub(channel).Generate(
        request_of(prompt, tokens, f"socket-{rng.random()}"), timeout=240
    )
    reader = asyncio.ensure_future(call.read())
    await asyncio.sleep(rng.random())
    await channel.close()
    await asyncio.gather(reader, return_exceptions=True)
    return "closed the socket"


async def drop_http(address: str, prompt: tuple[int, ...], tokens: int, rng: random.Random) -> str:
    """A raw HTTP client that disconnects in the middle of the stream."""
    host, port = address.removeprefix("http://").split(":")
    body = f'{{"prompt": {list(prompt)}, "max_tokens": {tokens}, "temperature": 0, "stream": true}}'
    lines = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write((head + body).encode())
    await writer.drain()
    await asyncio.sleep(rng.random())
    writer.transport.abort()
    return "dropped HTTP"


async def abort_by_id(stub: Any, prompt: tuple[int, ...], tokens: int, rng: random.Random) -> str:
    """Aborts the request through a second call; the stream then ends with finish reason abort."""
    name = f"abort-{rng.random()}"
    call = stub.Generate(request_of(prompt, tokens, name), timeout=240)
    endings = asyncio.ensure_future(_endings(call))
    await asyncio.sleep(rng.random())
    aborted = (await stub.Abort(inference_pb2.AbortRequest(request_id=name), timeout=60)).found
    expected = types_pb2.FINISH_REASON_ABORT if aborted else types_pb2.FINISH_REASON_LENGTH
    assert await endings == [expected]
    return "aborted by id"


async def _endings(call: Any) -> list[int]:
    return [m.complete.finish_reason async for m in call if m.HasField("complete")]


async def storm(cluster: Any, prompts: list[tuple[int, ...]], requests: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    channel = open_client_channel(cluster.grpc_address)
    stub = inference_pb2_grpc.InferenceStub(channel)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(i: int) -> str:
        prompt, tokens = prompts[rng.randrange(PROMPTS)], rng.randint(1, ANSWER_TOKENS_MAX)
        async with gate:
            if i % 3:
                return await to_the_end(stub, prompt, tokens)
            match i // 3 % 5:
                case 0:
                    return await cancel_after_a_while(stub, prompt, tokens + 8, rng)
                case 1:
                    return await cancel_at_token(stub, prompt, tokens + 8, rng, wanted=1 if i // 15 % 2 else 6)
                case 2:
                    return await close_the_socket(cluster.grpc_address, prompt, tokens + 8, rng)
                case 3:
                    return await drop_http(cluster.http_address, prompt, tokens + 8, rng)
                case _:
                    return await abort_by_id(stub, prompt, tokens + 8, rng)

    outcomes = await asyncio.gather(*(one(i) for i in range(requests)))
    await channel.close()
    return {kind: outcomes.count(kind) for kind in sorted(set(outcomes))}


@pytest.mark.timeout(600)
def test_cancelled_requests_leave_every_page_free(
    running_cluster: Callable[..., Any], prompts: list[tuple[int, ...]]
) -> None:
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)
    earlier = len(cancelled_requests(cluster))
    for number in range(STORMS):
        requests = LATER_REQUESTS if number else REQUESTS
        outcomes = asyncio.run(storm(cluster, prompts, requests, seed=20 + number))
        assert outcomes["finished"] == sum(1 for i in range(requests) if i % 3)
        assert len(outcomes) == 6
        cluster.assert_idle_and_sound()
        cancelled = cancelled_requests(cluster)[earlier:]
        moments = Counter(moment for _, moment in cancelled)
        ways = Counter(re.split("[-~]", name)[0] for name, _ in cancelled)
        print(outcomes, moments, ways)
        if moments.keys() == MOMENTS.keys() and ways.keys() >= WAYS:
            return
    raise AssertionError("not every moment was hit, or not in every way")


def cancelled_requests(cluster: Any) -> list[tuple[str, str]]:
    """Returns the name and the phase of each request that the router cancelled while it ran."""
    moment_of = {event.name: moment for moment, event_times in MOMENTS.items() for event in event_times}
    cancellations = re.findall(r"request (\S+) cancelled after (\w+)", cluster.log("router"))
    return [(name, moment_of[event]) for name, event in cancellations]


@pytest.mark.timeout(240)
def test_a_request_cancelled_in_prefill_leaves_every_page_free(
    running_cluster: Callable[..., Any], prompts: list[tuple[int, ...]]
) -> None:
    """A prompt of several chunks on an idle cluster is cancelled once the prefill worker holds pages for it."""
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)
    cluster.assert_idle_and_sound()
    longest = max(prompts, key=len)
    for number in range(IN_PREFILL_TRIES):
        name = f"midst-{number}"
        asyncio.run(cancel_amid_prefill(cluster, longest, name))
        cluster.assert_idle_and_sound()
        moments = [moment for known, moment in cancelled_requests(cluster) if known.startswith(f"{name}~")]
        if moments == ["at the prefill worker"]:
            return
    raise AssertionError("no request was cancelled in prefill")


async def cancel_amid_prefill(cluster: Any, prompt: tuple[int, ...], name: str) -> None:
    channel = open_client_channel(cluster.grpc_address)
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    request = request_of(prompt, 64, name)
    request.options.cache_salt = name
    call = stub.Generate(request, timeout=60)
    reader = asyncio.ensure_future(call.read())
    while not (reader.done() or await asyncio.to_thread(prefills, cluster)):
        pass
    call.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await channel.close()


def prefills(cluster: Any) -> bool:
    """Returns True if a prefill worker holds pages, which it allocates when a prompt's first chunk begins."""
    return any(one.pages_owned for one in cluster.inspect() if one.peer.worker_id.startswith("prefill"))
