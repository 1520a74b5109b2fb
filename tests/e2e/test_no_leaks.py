"""Many requests, a third of them cancelled at random moments, leave every page free or in the prefix cache."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tandem.net.rpc import open_client_channel
from tandem.protocol.generated.tandem.v1 import inference_pb2_grpc
from tandem.protocol.lifecycle.events import LifecycleEvent
from tests.load.storm import WAYS, Prompt, request_of, storm

REQUESTS = 75
IN_PREFILL_TRIES = 20
STORMS = 8
LATER_REQUESTS = 45
PROMPTS = 12
"""The number of prompts that requests are drawn from: the shortest, up to 65 tokens."""
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


@pytest.mark.timeout(600)
def test_cancelled_requests_leave_every_page_free(
    running_cluster: Callable[..., Any], prompts: list[tuple[int, ...]]
) -> None:
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)
    earlier = len(cancelled_requests(cluster))
    for number in range(STORMS):
        requests = LATER_REQUESTS if number else REQUESTS
        outcomes = asyncio.run(storm(cluster, prompts[:PROMPTS], requests, seed=20 + number))
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
    call = stub.Generate(request_of(Prompt(prompt, salt=name), 64, name), timeout=60)
    reader = asyncio.ensure_future(call.read())
    while not (reader.done() or await asyncio.to_thread(prefills, cluster)):
        pass
    call.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await channel.close()


def prefills(cluster: Any) -> bool:
    """Returns True if a prefill worker holds pages, which it allocates when a prompt's first chunk begins."""
    return any(one.pages_owned for one in cluster.inspect() if one.peer.worker_id.startswith("prefill"))
