"""Streams keep their tokens while the cluster changes its mode, workers change roles, and one of them restarts.

Every token equals that of an undisturbed cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tandem.net.rpc import open_client_channel
from tandem.protocol.generated.tandem.v1 import inference_pb2_grpc
from tests.e2e.test_same_tokens import ask

NEW_TOKENS = 12
CLIENTS = 3
CHANGES: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"mode": "colocated", "step_policy": "chunked", "step_budget": 48}, {"decode-0": "both", "prefill-0": "both"}),
    # No grace period: decoding requests continue on another worker after the tokens they have.
    ({"mode": "disaggregated", "grace_s": 0.0}, {"decode-0": "decode", "prefill-0": "prefill"}),
    ({"mode": "adaptive", "step_policy": "decode-priority"}, {"decode-0": "both", "prefill-0": "both"}),
    (
        {"mode": "disaggregated", "prefill": 1, "decode": 1, "step_policy": "unchunked"},
        {"decode-0": "decode", "prefill-0": "prefill"},
    ),
]
"""Mode changes, and the workers' roles after each.

The last one restores the start configuration, so that other tests can share the cluster.
"""


class Traffic:
    """Clients that send prompts one after the other and compare each answer with that of an undisturbed cluster."""

    def __init__(self, stub: inference_pb2_grpc.InferenceStub, quiet: dict[tuple[int, ...], list[int]]) -> None:
        self._stub = stub
        self._quiet = quiet
        self._over = False
        self.answers = 0
        self._clients = [asyncio.ensure_future(self._ask(number)) for number in range(CLIENTS)]

    async def more(self, answers: int) -> None:
        """Waits until `answers` more requests have ended."""
        enough = self.answers + answers
        while self.answers < enough:
            for client in self._clients:
                if client.done():
                    client.result()
            await asyncio.sleep(0.02)

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._clients)

    async def _ask(self, number: int) -> None:
        prompts = list(self._quiet)
        while not self._over:
            prompt = prompts[number % len(prompts)]
            tokens, _ = await ask(self._stub, prompt, NEW_TOKENS, salt=f"live-{self.answers}")
            assert tokens == self._quiet[prompt]
            self.answers += 1
            number += 1


async def live(cluster: Any, prompts: list[tuple[int, ...]]) -> None:
    """Runs through all modes, and then without the only decode worker until it has restarted."""
    channel = open_client_channel(cluster.grpc_address)
    try:
        stub = inference_pb2_grpc.InferenceStub(channel)
        quiet = {prompt: (await ask(stub, prompt, NEW_TOKENS, salt="quiet"))[0] for prompt in prompts}
        traffic = Traffic(stub, quiet)
        for change, roles in CHANGES:
            await traffic.more(1)
            workers, _ = await cluster.controller.set_mode(**change)
            assert {info.peer.worker_id: info.role.value for info in workers} == roles
            assert all(info.closing is None for info in workers)
        await traffic.more(CLIENTS)
        before = _incarnations(cluster)
        await cluster.controller.drain_worker("decode-0", restart=True)
        await traffic.more(1)
        await traffic.end()
        after = _incarnations(cluster)
        assert after["prefill-0"] == before["prefill-0"]
        assert after["decode-0"] > before["decode-0"]
    finally:
        await channel.close()


def _incarnations(cluster: Any) -> dict[str, int]:
    return {info.peer.worker_id: info.peer.incarnation for info in cluster.members()}


@pytest.mark.timeout(300)
def test_streams_keep_their_tokens_while_modes_and_roles_change(
    running_cluster: Callable[..., Any], prompts: list[tuple[int, ...]]
) -> None:
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)
    before, restarts = _incarnations(cluster), cluster.named("decode-0").restarts
    asyncio.run(live(cluster, [prompts[number] for number in (0, 4, 8)]))
    assert _incarnations(cluster)["prefill-0"] == before["prefill-0"], "no change of mode starts a worker anew"
    assert {info.peer.worker_id: info.role for info in cluster.members()} == CHANGES[-1][1]
    assert cluster.named("decode-0").restarts == restarts, "it was drained, it did not die"
    cluster.assert_idle_and_sound()
