"""SIGKILL of a role's only worker: clear errors at once, and a cluster that recovers without intervention.

The router stays the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from .moments import freeze_amid_transfer, kill, restarted, thawed
from .streams import Client, Question, Stream, undisturbed
from .traffic import serves_again

NOTICED_WITHIN_S = 60.0
"""Half of the time that a router waits for a worker that is merely silent."""
IN_DECODE = 3
SHORT = [Question((5, 6, 7, 8 + n), 400) for n in range(5)]
LONG = Question(tuple(3 + n % 4000 for n in range(3000)), 16)


async def killed_amid(cluster: Any, role: str) -> tuple[list[Stream], float]:
    """Five requests in decode, one in prefill whose pages are being written, and when the worker was killed."""
    async with Client(cluster.grpc_address) as client:
        streams = [client.ask(question) for question in SHORT]
        await asyncio.gather(*(stream.reached(IN_DECODE) for stream in streams))
        streams.append(client.ask(LONG))
        moment = await asyncio.to_thread(freeze_amid_transfer, cluster)
        with thawed(moment.prefill):
            kill(getattr(moment, role))
            killed_at = time.monotonic()
        await asyncio.gather(*(stream.task for stream in streams))
        return streams, killed_at


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_sigkill(role: str, pair: Callable[..., Any]) -> None:
    cluster = pair()
    before = cluster.worker(role)
    expected = asyncio.run(undisturbed(cluster.grpc_address, SHORT))

    streams, killed_at = asyncio.run(killed_amid(cluster, role))
    if role == "prefill":
        for stream, tokens in zip(streams, expected, strict=False):
            stream.check(tokens)
    lost = streams[-1:] if role == "prefill" else streams
    for stream in lost:
        assert stream.code is grpc.StatusCode.UNAVAILABLE, stream.words
        assert role in stream.words, stream.words
        assert stream.ended_at - killed_at < NOTICED_WITHIN_S

    assert asyncio.run(serves_again(cluster.grpc_address, 90, LONG.request())) == LONG.tokens
    restarted(cluster, before)
    cluster.assert_idle_and_sound()
