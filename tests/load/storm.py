"""Many requests over gRPC and HTTP, of which a third is cancelled at random moments, in all ways that clients have."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from tandem.net.rpc import open_client_channel
from tandem.protocol.generated.tandem.v1 import inference_pb2, inference_pb2_grpc, types_pb2

AT_ONCE = 24
ANSWER_TOKENS_MAX = 12
WAYS = {"waiting", "token", "socket", "abort", "req"}
"""Prefixes of the names of cancelled requests; requests of HTTP clients are named req-…."""


class Prompt(NamedTuple):
    """The token ids of a prompt, and its cache salt: prompts with different salts share no pages."""

    ids: tuple[int, ...]
    salt: str = ""


def request_of(prompt: Prompt, tokens: int, request_id: str = "") -> inference_pb2.GenerateRequest:
    """Returns a greedy request for exactly `tokens` tokens."""
    return inference_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=inference_pb2.TokenIds(ids=prompt.ids),
        options=inference_pb2.GenerationOptions(
            max_tokens=tokens, temperature=0, ignore_eos=True, cache_salt=prompt.salt
        ),
    )


async def to_the_end(stub: Any, prompt: Prompt, tokens: int) -> str:
    got = [t async for m in stub.Generate(request_of(prompt, tokens), timeout=240) for t in m.chunk.token_ids]
    assert len(got) == tokens
    return "finished"


async def cancel_after_a_while(stub: Any, prompt: Prompt, tokens: int, rng: random.Random) -> str:
    call = stub.Generate(request_of(prompt, tokens, f"waiting-{rng.random()}"), timeout=240)
    await asyncio.sleep(rng.choice([0, 0.01, 0.1, 0.4, 1.5]) * rng.random())
    call.cancel()
    return "cancelled while waiting"


async def cancel_at_token(stub: Any, prompt: Prompt, tokens: int, rng: random.Random, wanted: int) -> str:
    """Cancels at token number `wanted`: the first one comes during the KV transfer, a later one in decode."""
    call = stub.Generate(request_of(prompt, tokens, f"token-{rng.random()}"), timeout=240)
    got = 0
    async for message in call:
        got += len(message.chunk.token_ids)
        if got >= wanted:
            call.cancel()
            break
    return "cancelled at a token"


async def close_the_socket(address: str, prompt: Prompt, tokens: int, rng: random.Random) -> str:
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


async def drop_http(address: str, prompt: Prompt, tokens: int, rng: random.Random) -> str:
    """A raw HTTP client that disconnects in the middle of the stream."""
    host, port = address.removeprefix("http://").split(":")
    body = f'{{"prompt": {list(prompt.ids)}, "max_tokens": {tokens}, "temperature": 0, "stream": true}}'
    lines = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write((head + body).encode())
    await writer.drain()
    await asyncio.sleep(rng.random())
    writer.transport.abort()
    return "dropped HTTP"


async def abort_by_id(stub: Any, prompt: Prompt, tokens: int, rng: random.Random) -> str:
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


async def storm(
    cluster: Any, prompts: Sequence[tuple[int, ...]], requests: int, seed: int, salts: int = 1 << 30
) -> dict[str, int]:
    """Sends requests with random ones of the prompts, at most AT_ONCE at a time; returns the numbers of outcomes.

    Half of the requests that are cancelled have one of `salts` cache salts.
    """
    rng = random.Random(seed)
    channel = open_client_channel(cluster.grpc_address)
    stub = inference_pb2_grpc.InferenceStub(channel)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(i: int) -> str:
        salt = "" if i % 3 or rng.random() < 0.5 else str(rng.randrange(salts))
        prompt, tokens = Prompt(rng.choice(prompts), salt), rng.randint(1, ANSWER_TOKENS_MAX)
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
