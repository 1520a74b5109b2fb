"""One client sends far more than the router reads: other streams continue, and no process dies."""

import asyncio
from collections import Counter
from typing import Any

import grpc.aio
import httpx
import pytest

from router.front.link import MESSAGES_BYTES_MAX
from router.front.processes import FrontListeners
from tandem.net.rpc import RETRY_AFTER
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import channel_to, until
from tests.unit.router.test_generate import Client, ask, expected

LARGE = (4 << 20) - 1000
MESSAGES = 100
"""Messages of 4 MiB, more than a link buffered before it was cut."""


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"front_processes": 1}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process counts as hanging, however slow this machine is."""
    for looks in ("SILENT_LOOKS", "STARTING_LOOKS"):
        monkeypatch.setattr(f"router.front.pulse.{looks}", 10**9)


def listeners(cluster: Cluster) -> FrontListeners:
    opened = cluster.router._opened
    assert isinstance(opened, FrontListeners)
    return opened


def router_reads(cluster: Cluster, reads: bool) -> None:
    """Pauses or resumes the router's reading from its front processes."""
    for front in listeners(cluster)._fronts:
        transport: Any = front._stream._writer.transport
        transport.resume_reading() if reads else transport.pause_reading()


async def test_messages_of_one_client_that_the_router_does_not_read_end_nothing(cluster: Cluster) -> None:
    """Regression: at 256 MiB the router's link to the process was cut, and with it all streams."""
    cluster.decode.switches.held_at = 20
    outcomes: Counter[grpc.StatusCode] = Counter()
    hints: set[str] = set()

    async def hostile(channel: grpc.aio.Channel) -> None:
        asked = pb.GenerateRequest(model="another", text="x" * LARGE)
        error = await Client(channel).error(asked)
        outcomes[error.code()] += 1
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            hints.add(str(dict(error.trailing_metadata() or ())[RETRY_AFTER]))

    address = cluster.endpoints.grpc_address
    async with channel_to(address, "") as channel, channel_to(address, "") as others:
        other = Client(channel)
        answering = asyncio.create_task(other.run(ask(40)))
        await until(lambda: cluster.decode.tasks, "it decodes")
        router_reads(cluster, False)
        sending = [asyncio.create_task(hostile(others)) for _ in range(MESSAGES)]
        fit = MESSAGES_BYTES_MAX // LARGE
        await until(lambda: outcomes.total() >= MESSAGES - fit, "those beyond the limit are refused")
        small = asyncio.create_task(other.run(ask(4)))
        router_reads(cluster, True)
        cluster.decode.go.set()
        assert (await answering)[1] == expected(40)
        assert (await small)[1] == expected(4)
        await asyncio.gather(*sending)
    assert outcomes.pop(grpc.StatusCode.RESOURCE_EXHAUSTED) >= MESSAGES - fit
    assert hints == {"1"}
    assert outcomes.total() <= fit
    assert [figures.restarts for figures in listeners(cluster)._figures] == [0]


async def test_bodies_of_one_client_that_the_router_does_not_read_end_nothing(cluster: Cluster) -> None:
    cluster.decode.switches.held_at = 20
    host = f"http://{cluster.endpoints.http_address}"
    limits = httpx.Limits(max_connections=None)
    async with (
        channel_to(cluster.endpoints.grpc_address, "") as channel,
        httpx.AsyncClient(base_url=host, limits=limits, timeout=60) as hostile,
    ):
        answering = asyncio.create_task(Client(channel).run(ask(40)))
        await until(lambda: cluster.decode.tasks, "it decodes")
        router_reads(cluster, False)
        body = b'{"model": "another", "prompt": "' + b"x" * LARGE + b'"}'
        sending = [asyncio.create_task(hostile.post("/v1/completions", content=body)) for _ in range(MESSAGES)]
        await asyncio.sleep(1.0)  # the front processes send as much as flow control allows
        router_reads(cluster, True)
        cluster.decode.go.set()
        assert (await answering)[1] == expected(40)
        assert {(await answer).status_code for answer in sending} <= {400, 404, 429}
    assert [figures.restarts for figures in listeners(cluster)._figures] == [0]
