"""SIGKILL of a role's only worker: every request waits for its replacement and gets the tokens of a quiet cluster.

The router stays the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.soak import soak

from .moments import freeze_amid_transfer, kill, restarted, thawed
from .streams import Client, Question, Stream, undisturbed

IN_DECODE = 3
SHORT = [Question((5, 6, 7, 8 + n), 400) for n in range(5)]
LONG = Question(tuple(3 + n % 4000 for n in range(3000)), 16)
LATER = Question((5, 6, 7, 99), 40)
"""A request that arrives after the death."""


async def killed_amid(cluster: Any, role: str) -> list[Stream]:
    """Five requests in decode, one in prefill whose pages are being written, and one that arrives after the kill."""
    async with Client(cluster.grpc_address) as client:
        streams = [client.ask(question) for question in SHORT]
        await asyncio.gather(*(stream.reached(IN_DECODE) for stream in streams))
        streams.append(client.ask(LONG))
        moment = await asyncio.to_thread(freeze_amid_transfer, cluster)
        with thawed(moment.prefill):
            kill(getattr(moment, role))
        streams.append(client.ask(LATER))
        await asyncio.gather(*(stream.task for stream in streams))
        return streams


@pytest.mark.timeout(900)
@pytest.mark.parametrize("role", ["prefill", pytest.param("decode", marks=soak)])
def test_all_requests_wait_for_the_replacement_of_a_killed_worker(role: str, pair: Callable[..., Any]) -> None:
    cluster = pair()
    before, router = cluster.worker(role), cluster.router().pid
    expected = asyncio.run(undisturbed(cluster.grpc_address, [*SHORT, LONG, LATER]))

    streams = asyncio.run(killed_amid(cluster, role))
    for stream, tokens in zip(streams, expected, strict=True):
        stream.check(tokens)
    restarted(cluster, before)
    assert cluster.router().pid == router
    assert f"{role}-0 is gone (the process died)" in cluster.log("controller")
    cluster.assert_idle_and_sound()
