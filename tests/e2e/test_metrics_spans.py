"""A second router on a real cluster exports spans to a collector in the test.

The spans cover router and both workers, and their duration is what the client measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from typer.testing import CliRunner

from router.config import RouterConfig
from router.server import RouterServer
from tandem.cli.main import app
from tandem.protocol.generated.tandem.v1 import inference_pb2, inference_pb2_grpc
from tandem.protocol.mode import Mode
from tandem.settings.model import ModelSettings
from tandem.settings.secrets import Secrets
from tests.unit.router.fake_cluster import until
from tests.unit.router.test_traces import TRIES, Receiver, attributes, seconds

PROMPT = "Zanzibar's lighthouse keeper counted seventeen albatrosses before breakfast, and wrote down every one. " * 2
Traced = tuple[str, RouterServer, Receiver]


@pytest.fixture
async def traced(running_cluster: Callable[..., Any], model_folder: Path) -> AsyncIterator[Traced]:
    """Yields the second router's gRPC address, the router, and the receiver of its spans."""
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)
    receiver = Receiver()
    ends = cluster._cluster.endpoints
    config = RouterConfig(
        "router-traced",
        ModelSettings(model_folder, ("SmolLM2-135M-Instruct",)),
        ends.controller,
        Secrets(ends.token),
        grpc_port=0,
        http_port=0,
        mode=Mode.DISAGGREGATED,
        otlp_endpoint=receiver.endpoint,
    )
    router = RouterServer(config)
    try:
        listeners = await router.start()
        await until(lambda: router.ready, "the router has workers")
        yield listeners.grpc_address, router, receiver
    finally:
        await router.stop(1.0)
        receiver.stop()


async def test_spans_of_a_real_cluster_add_up(traced: Traced) -> None:
    address, router, receiver = traced
    exporter: Any = router._exporter
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)

        for number in range(TRIES):
            options = inference_pb2.GenerationOptions(max_tokens=3 + number, temperature=0, ignore_eos=True)
            request = inference_pb2.GenerateRequest(text=f"{number} {PROMPT}", options=options)
            asked = time.time_ns()
            async for _ in stub.Generate(request):
                pass
            received = time.time_ns()
            assert await asyncio.to_thread(exporter.flush)
            root = receiver.roots[-1]
            check(root, receiver)
            assert asked <= root.start_time_unix_nano < root.end_time_unix_nano <= received


def check(root: Any, receiver: Receiver) -> None:
    """Asserts that the request passed both workers, that its phases add up, and that no span contains text."""
    phases = {span.name: span for span in receiver.under(root)}
    assert list(phases) == ["queue", "prefill", "transfer", "decode"]
    assert sum(map(seconds, phases.values())) == pytest.approx(seconds(root), abs=1e-9)
    assert attributes(phases["prefill"])["tandem.worker"] == "prefill-0"
    assert attributes(phases["decode"])["tandem.worker"] == "decode-0"
    assert attributes(phases["transfer"])["tandem.transfer.bytes"] > 0
    assert "albatross" not in str(phases.values()) + str(root)


def test_the_terminal_draws_a_real_request_and_names_bottlenecks(running_cluster: Callable[..., Any]) -> None:
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)
    request = inference_pb2.GenerateRequest(
        request_id="to be drawn".replace(" ", "-"), text=PROMPT, options=inference_pb2.GenerationOptions(max_tokens=5)
    )
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        assert list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60))
    for command, words in (
        (["trace", "to-be-drawn", "--router", cluster.http_address], ("prefill-0", "decode-0", "first token after")),
        (["trace", "--slow", "--router", cluster.http_address], ("total ms", "best_effort")),
        (["why", "--metrics", cluster.metrics_address, "--seconds", "0.3"], ("prefill-0", "decode-0")),
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        assert all(word in done.output for word in words), done.output
