"""A second router at a real cluster, which exports spans to a collector of the test's own: from the router through both
workers, as long as the client says.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from router.config import RouterConfig
from router.placement import Mode
from router.server import RouterServer
from tests.unit.router.fake_cluster import until
from tests.unit.router.test_traces import NEAR_S, Receiver, attributes, seconds
from wire.generated.tandem.v1 import inference_pb2, inference_pb2_grpc

PROMPT = "Zanzibar's lighthouse keeper counted seventeen albatrosses before breakfast, and wrote down every one. " * 2
TRIES = 8
Traced = tuple[str, RouterServer, Receiver]


@pytest.fixture
async def traced(running_cluster: Callable[..., Any], model_folder: Path) -> AsyncIterator[Traced]:
    """The second router's gRPC address, itself, and where its spans go."""
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=512)
    receiver = Receiver()
    ends = cluster._cluster.endpoints
    config = RouterConfig(
        "router-traced",
        model_folder,
        "SmolLM2-135M-Instruct",
        ends.controller,
        ends.token,
        grpc_port=0,
        http_port=0,
        mode=Mode.DISAGGREGATED,
        otlp_endpoint=receiver.endpoint,
    )
    router = RouterServer(config)
    try:
        doors = await router.start()
        await until(lambda: router.ready, "the router has workers")
        yield doors.grpc_address, router, receiver
    finally:
        await router.stop(1.0)
        receiver.stop()


async def test_spans_of_a_real_cluster_add_up(traced: Traced) -> None:
    address, router, receiver = traced
    measured = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        for tokens in range(3, 3 + TRIES):
            options = inference_pb2.GenerationOptions(max_tokens=tokens, temperature=0, ignore_eos=True)
            request = inference_pb2.GenerateRequest(text=f"{tokens} {PROMPT}", options=options)
            began = time.perf_counter()
            async for _ in stub.Generate(request):
                pass
            measured.append(time.perf_counter() - began)
    exporter: Any = router._exporter
    assert exporter._provider.force_flush()
    assert len(receiver.roots) == TRIES
    for root, waited_s in zip(receiver.roots, measured, strict=True):
        phases = {span.name: span for span in receiver.under(root)}
        assert list(phases) == ["queue", "prefill", "transfer", "decode"]
        assert sum(map(seconds, phases.values())) == pytest.approx(seconds(root), abs=1e-9)
        assert seconds(root) <= waited_s
        assert attributes(phases["prefill"])["tandem.worker"] == "prefill-0"
        assert attributes(phases["decode"])["tandem.worker"] == "decode-0"
        assert attributes(phases["transfer"])["tandem.transfer.bytes"] > 0
        assert "albatross" not in str(root)
    # Others use this machine too, but not every time.
    assert min(waited_s - seconds(root) for root, waited_s in zip(receiver.roots, measured, strict=True)) < NEAR_S
