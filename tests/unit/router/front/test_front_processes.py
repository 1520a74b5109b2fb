"""Listeners in separate processes: same answers, errors and cancellations, and dead processes are replaced."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from router.front.processes import FrontListeners, _spawn
from router.server import RouterServer
from router.text.tokenizer import Tokenizer
from tandem.net.rpc import ERROR_CODE
from tandem.net.security.credentials import metrics_key_of
from tandem.protocol.errors import FailedPrecondition
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import channel_to, until
from tests.unit.router.test_generate import Client, ask, expected

GENERATE = "/tandem.v1.Inference/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
NEVER = 10**9
KEY = (("authorization", "Bearer key"),)


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"front_processes": 2, "api_keys": ("key",)}


@pytest.fixture(autouse=True)
def often_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks front processes often, but none counts as hanging, however slow this machine is."""
    monkeypatch.setattr("router.front.pulse.LOOK_S", 0.05)
    for looks in ("SILENT_LOOKS", "STARTING_LOOKS"):
        monkeypatch.setattr(f"router.front.pulse.{looks}", NEVER)


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with channel_to(cluster.endpoints.grpc_address, "key") as channel:
        yield Client(channel)


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": "Bearer key"}
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}", headers=headers) as opened:
        yield opened


def listeners(cluster: Cluster) -> FrontListeners:
    opened = cluster.router._opened
    assert isinstance(opened, FrontListeners)
    return opened


def alive(cluster: Cluster) -> set[asyncio.subprocess.Process]:
    """Returns the processes that have opened their listeners and not exited."""
    return {process for front, process in listeners(cluster)._fronts.items() if front.opened}


async def test_both_listeners_answer_as_the_router_s_own(
    cluster: Cluster, client: Client, http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    text, ids, complete = await client.run(ask(40))
    assert (text, ids, complete.prompt_tokens) == (tokenizer.decode(expected(40)), expected(40), 4)
    assert (await client.stub.GetModelInfo(pb.GetModelInfoRequest())).model == "fake"
    assert not (await client.stub.Abort(pb.AbortRequest(request_id="nobody"))).found
    asked = {"model": "fake", "prompt": [5, 6, 7, 8], "max_tokens": 40}
    whole = await http.post("/v1/completions", json=asked)
    assert whole.json()["choices"][0]["text"] == text
    async with http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as streamed:
        lines = [line async for line in streamed.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 2
    assert (await http.get("/ready")).json() == {"status": "ready"}
    channel = grpc.aio.insecure_channel(cluster.endpoints.grpc_address)
    request = health_pb2.HealthCheckRequest(service="tandem.v1.Inference")
    health = health_pb2_grpc.HealthStub(channel)
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
    await cluster.members()
    await until(lambda: not cluster.router.ready, "no worker is left")
    watched = health.Watch(request)
    while (await watched.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
        pass
    await channel.close()


async def test_errors_keep_their_status_words_and_code(
    cluster: Cluster, client: Client, http: httpx.AsyncClient
) -> None:
    error = await client.error(ask(8, temperature=-1.0))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "temperature" in str(error.details())
    assert dict(error.trailing_metadata() or ())[ERROR_CODE] == "INVALID_ARGUMENT"
    refused = await http.post("/v1/completions", json={"model": "fake", "prompt": "a", "temperature": -1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    assert (await http.get("/nowhere")).status_code == 404
    large = await http.post("/v1/completions", content=b"x" * (5 << 20))
    assert large.status_code == 400
    async with channel_to(cluster.endpoints.grpc_address, "another") as channel:
        assert (await Client(channel).error(ask())).code() is grpc.StatusCode.UNAUTHENTICATED
        unknown = channel.unary_unary("/tandem.v1.Inference/Unknown")
    async with channel_to(cluster.endpoints.grpc_address, "key") as channel:
        unknown = channel.unary_unary("/tandem.v1.Inference/Unknown")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unknown(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        broken = channel.unary_stream("/tandem.v1.Inference/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await broken(b"\xff").read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await client.run(ask(8)))[1] == expected(8)


async def test_clients_that_leave_cancel_their_requests(
    cluster: Cluster, client: Client, http: httpx.AsyncClient
) -> None:
    cluster.decode.switches.step_s = 0.01
    call = client.stub.Generate(ask(1000))
    await call.read()
    asked = {"model": "fake", "prompt": [5, 6], "max_tokens": 1000, "stream": True}
    async with http.stream("POST", "/v1/completions", json=asked) as streamed:
        await anext(streamed.aiter_lines())
        call.cancel()
    await cluster.settled()


async def test_one_that_dies_takes_its_own_clients_along_and_comes_back(cluster: Cluster) -> None:
    await until(lambda: len(alive(cluster)) == 2, "both have opened their listeners")
    cluster.decode.switches.held_at = 20
    outcomes: list[list[int] | grpc.StatusCode] = []

    async def one() -> None:
        address, alone = cluster.endpoints.grpc_address, [("grpc.use_local_subchannel_pool", 1)]
        call = grpc.aio.insecure_channel(address, alone).unary_stream(*GENERATE)(ask(30), metadata=KEY)
        try:
            outcomes.append([token async for message in call for token in message.chunk.token_ids])
        except grpc.aio.AioRpcError as error:
            outcomes.append(error.code())

    running = [asyncio.create_task(one()) for _ in range(16)]  # each on its own connection
    dispatcher = cluster.router._dispatcher
    await until(lambda: dispatcher.running == 16, "all of them run")
    await until(lambda: len(cluster.decode.tasks) == 16, "all of them decode")
    victim = next(iter(listeners(cluster)._fronts.values()))
    victim.send_signal(signal.SIGKILL)
    await until(lambda: dispatcher.running < 16, "the router knows who has left")
    cluster.decode.go.set()
    await asyncio.gather(*running)
    lost = outcomes.count(grpc.StatusCode.UNAVAILABLE)
    assert 0 < lost < 16, "the kernel spreads connections"
    assert outcomes.count(expected(30)) == 16 - lost
    await until(lambda: len(alive(cluster) - {victim}) == 2, "another takes its place")
    await one()
    assert outcomes[-1] == expected(30)


async def test_when_the_router_is_gone_clients_hear_so(cluster: Cluster, client: Client) -> None:
    cluster.decode.switches.held_at = 20
    answering = asyncio.create_task(client.error(ask(1000)))
    await until(lambda: cluster.router._dispatcher.running == 1, "it runs")
    before = alive(cluster)
    for front in listeners(cluster)._fronts:
        front._stream.close()  # as when the router's process exits
    error = await answering
    assert (error.code(), error.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        "the router ended while it answered; send the request again",
    )
    await until(lambda: len(alive(cluster) - before) == 2, "they ended, and others came")
    await cluster.settled()


async def test_stopping_lets_answers_end(cluster: Cluster, client: Client) -> None:
    cluster.decode.switches.step_s = 0.01
    answering = asyncio.create_task(client.run(ask(50)))
    await until(lambda: cluster.router._dispatcher.running == 1, "it runs")
    processes = alive(cluster)
    await cluster.router.stop(30.0)
    assert (await answering)[1] == expected(50)
    assert all(process.returncode == 0 for process in processes)
    await cluster.router.start()  # for the fixture, at other ports


async def test_a_taken_port_is_told_in_words(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.front.processes._PORT_S", 0.0)
    for listener in ("grpc", "http"):
        port = int(getattr(cluster.endpoints, f"{listener}_address").split(":")[1])
        with pytest.raises(FailedPrecondition, match=f"{listener}_port: .*{port}"):
            await RouterServer(replace(cluster.config, **{f"{listener}_port": port})).start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(FailedPrecondition, match=f"_port: .*{port}"):
        await RouterServer(replace(cluster.config, grpc_port=port, http_port=port)).start()


async def test_clients_that_left_keep_no_stop_waiting(cluster: Cluster) -> None:
    """Regression: the tasks that forward answers were never woken, so each stop waited for its whole grace period."""
    cluster.decode.switches.step_s = 0.01
    host, port = cluster.endpoints.http_address.split(":")
    body = b'{"model": "fake", "prompt": [5, 6], "max_tokens": 1000, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer key\r\ncontent-length: %d\r\n\r\n"
    whole = head % len(body) + body
    for sent, read in ((whole[:20], 0), (whole[:-1], 0), (whole, 0), (whole, 1)):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        await writer.drain()
        await reader.readexactly(read)
        writer.close()
    await cluster.settled()
    async with asyncio.timeout(10):
        await cluster.router.stop(30.0)
    await cluster.router.start()  # for the fixture


async def test_a_stop_waits_for_no_process_that_starts(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a starting process was not asked to stop, accepted clients, and was killed after the grace period."""
    monkeypatch.setattr("router.front.processes._AGAIN_S", 0.0)
    await until(lambda: len(alive(cluster)) == 2, "both have opened their listeners")
    fronts = listeners(cluster)._fronts
    victim = next(iter(alive(cluster)))
    victim.kill()
    await until(lambda: victim not in fronts.values() and len(fronts) == 2, "another starts")
    assert len(alive(cluster)) == 1
    starting = set(fronts.values()) - alive(cluster)
    async with asyncio.timeout(10):
        await cluster.router.stop(30.0)
    assert [process.returncode for process in starting] == [-signal.SIGKILL]
    await cluster.router.start()  # for the fixture


async def test_one_that_hangs_is_replaced(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it was never replaced, and every second connection failed."""
    monkeypatch.setattr("router.front.processes._END_S", 0.2)
    front, process = next(iter(listeners(cluster)._fronts.items()))
    process.send_signal(signal.SIGSTOP)
    front._stream._writer.transport.abort()  # as after too much unread data
    await until(lambda: process.returncode == -signal.SIGKILL, "it ended")
    await until(lambda: len(alive(cluster) - {process}) == 2, "another takes its place")


async def test_one_that_stands_still_is_replaced(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: its stream stayed open, so it was never replaced, and its share of the connections failed."""
    await until(lambda: len(alive(cluster)) == 2, "both have opened their listeners")
    victim = next(iter(alive(cluster)))
    victim.send_signal(signal.SIGSTOP)
    monkeypatch.setattr("router.front.pulse.SILENT_LOOKS", 20)
    await until(lambda: victim.returncode == -signal.SIGKILL, "it ended")
    monkeypatch.setattr("router.front.pulse.SILENT_LOOKS", NEVER)
    await until(lambda: len(alive(cluster) - {victim}) == 2, "another takes its place")


async def test_operators_see_what_each_of_them_carries(
    cluster: Cluster, client: Client, http: httpx.AsyncClient
) -> None:
    await until(lambda: len(alive(cluster)) == 2, "both have opened their listeners")
    host, port = cluster.endpoints.http_address.split(":")
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
    before = await figures(http)
    await client.run(ask(40))
    # The four idle ones, one for the metrics and one for the answers.
    await until(lambda: sum(each.connections for each in listeners(cluster)._figures) == 6, "6 connections")
    now = await figures(http)
    assert set(now["tandem_front_connections"]) == {"0", "1"}
    assert sum(now["tandem_front_connections"].values()) == 6
    assert sum(now["tandem_front_messages_total"].values()) > sum(before["tandem_front_messages_total"].values())
    assert (await http.post("/v1/completions", content=b"x" * 300_000)).status_code == 400
    assert sum((await figures(http))["tandem_front_bytes_total"].values()) > 300_000
    for _, writer in idle:
        writer.close()
    await until(lambda: sum(each.connections for each in listeners(cluster)._figures) == 2, "2 connections")
    now = await figures(http)
    assert sum(now["tandem_front_restarts_total"].values()) == 0
    carried = sum(now["tandem_front_messages_total"].values())
    for process in alive(cluster):
        process.kill()
    async with httpx.AsyncClient(base_url=str(http.base_url), headers=http.headers) as again:
        await until(lambda: [each.restarts for each in listeners(cluster)._figures] == [1, 1], "the router knows")
        await until(lambda: len(alive(cluster)) == 2, "others take their places")
        now = await figures(again)
    assert now["tandem_front_restarts_total"] == {"0": 1, "1": 1}
    assert sum(now["tandem_front_messages_total"].values()) >= carried, "counted over all lives"


async def figures(http: httpx.AsyncClient) -> dict[str, dict[str, float]]:
    """Returns the metrics of front processes, by metric and process number."""
    found: dict[str, dict[str, float]] = {}
    page = await http.get("/metrics", headers={"authorization": f"Bearer {metrics_key_of('secret')}"})
    for family in text_string_to_metric_families(page.text):
        for sample in family.samples:
            if "front" in sample.labels:
                found.setdefault(sample.name, {})[sample.labels["front"]] = sample.value
    return found


async def test_one_that_cannot_be_started_now_is_started_later(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    async def spawn(stream: socket.socket) -> asyncio.subprocess.Process:
        tries.append("")
        if len(tries) <= 3:
            raise BlockingIOError("no process is left")
        return await _spawn(stream)

    monkeypatch.setattr("router.front.processes._spawn", spawn)
    monkeypatch.setattr("router.front.processes._AGAIN_S", 0.0)
    before = alive(cluster)
    for process in before:
        process.kill()
    await until(lambda: len(alive(cluster) - before) == 2, "others take their places")


async def test_they_are_found_wherever_the_router_was_started(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a folder of the same name in the working directory was imported as the router."""
    for name in ("router", "tandem", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('another')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("router.front.processes._START_S", 20.0)
    other = RouterServer(replace(cluster.config, router_id="router-1"))
    await other.start()
    await other.stop(0.0)
