"""Prefill and decode on two hosts of a Ray cluster over a lossy link: right tokens or clear errors, no page lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from tests.soak import soak

from .streams import Client, Question, Stream
from .two_hosts import TwoHosts, refusal, two_hosts
from .wire import ADDRESSES

DELAY_S, LOSS = 0.02, 0.01
CUT_S = 5.0
WRITING_S = 0.5
"""Time in seconds from the first advertised page to the cut; at that loss the whole transfer takes seconds."""
PROMPTS = [Question(tuple(3 + (n + 37 * k) % 4000 for n in range(400 + 16 * k)), 48) for k in range(4)]
LONG = Question(tuple(3 + n % 4000 for n in range(2000)), 48)
CLEAR = {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


@pytest.fixture
def _namespaces() -> None:
    why = refusal()
    if why:
        pytest.skip(why)


async def answers(hosts: TwoHosts, questions: list[Question]) -> list[Stream]:
    async with Client(hosts.router_address) as client:
        streams = [client.ask(question) for question in questions]
        await asyncio.gather(*(stream.task for stream in streams))
        return streams


async def cut_amid_transfer(hosts: TwoHosts) -> Stream:
    """Sends one long prompt and cuts the link while its pages are being written; some seconds later it is restored."""
    async with Client(hosts.router_address) as client:
        stream = client.ask(LONG)
        while True:
            assert not stream.task.done(), "the transfer was never seen on its way"
            if (await hosts.inspect("decode-0")).pages_advertised:
                await asyncio.sleep(WRITING_S)
                await hosts.wire.call(cut=True)
                if (await hosts.inspect("decode-0")).pages_advertised:
                    break
                await hosts.wire.call(cut=False)
            await asyncio.sleep(0.01)
        await asyncio.sleep(CUT_S)
        await hosts.wire.call(cut=False)
        await stream.task
        return stream


async def scenario(model: Path) -> None:
    async with two_hosts(model) as hosts:
        right = [stream.tokens for stream in await answers(hosts, [*PROMPTS, LONG])]
        hosts_of = {name: worker.address.rpartition(":")[0] for name, worker in hosts.workers.items()}
        hosts_of["controller"] = hosts.controller_address.rpartition(":")[0]
        assert hosts_of == {"controller": ADDRESSES[0], "decode-0": ADDRESSES[0], "prefill-0": ADDRESSES[1]}
        first = {name: worker.peer.incarnation for name, worker in hosts.workers.items()}
        await hosts.wire.call(delay_s=DELAY_S, loss=LOSS)
        for stream, tokens in zip(await answers(hosts, PROMPTS), right, strict=False):
            stream.check(tokens)
        await hosts.idle_and_sound()

        stream = await cut_amid_transfer(hosts)
        print("after the cut:", stream.code, stream.words)
        assert stream.code in CLEAR, (stream.code, stream.words)
        if stream.code is grpc.StatusCode.OK:
            stream.check(right[-1])
        else:
            assert "prefill-0" in stream.words or "decode-0" in stream.words, stream.words
        await hosts.idle_and_sound()
        for stream, tokens in zip(await answers(hosts, [*PROMPTS, LONG]), right, strict=True):
            stream.check(tokens)
        await hosts.idle_and_sound()
        await hosts.look()
        assert {name: worker.peer.incarnation for name, worker in hosts.workers.items()} == first, (
            "Ray gave a worker up"
        )
        transports = {worker.transport for worker in hosts.workers.values()}
        assert any("tcp" in transport for transport in transports), transports


@soak
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_namespaces")
def test_requests_over_a_lossy_link_end_with_right_tokens_or_clear_errors(small_model: Path) -> None:
    asyncio.run(scenario(small_model))
