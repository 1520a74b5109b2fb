"""Operators load and unload adapters at both listeners, with the controller's own list over workers that load any."""

import asyncio
import json
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import httpx
import pytest

from tandem.cluster.operations.adapters import Adapters
from tandem.cluster.service import ClusterServicer
from tandem.cluster.supervision.registry import Registry
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.generated.tandem.v1 import types_pb2
from tandem.protocol.messages import AdapterFacts, PeerRef, Role, WorkerInfo
from tests.fake_engine import FACTS
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import FakeController, channel_to, until
from tests.unit.router.test_generate import Client

KEYS = "tenant-key name=tenant\nops-key name=ops role=operator\nreads-key name=reads role=reader\n"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SQL: dict[str, Any] = {"lora_name": "sql", "lora_path": "/adapters/sql"}
PROMPT = {"prompt": [5, 6, 7, 8], "max_tokens": 4}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "keys").write_text(KEYS)
    return {
        "api_key_file": tmp_path / "keys",
        "audit_log": tmp_path / "audit.jsonl",
    }


class Loading(ClusterServicer):
    """The part of the controller that loads adapters, with one worker, which finds the same in any folder."""

    def __init__(self, controller: FakeController) -> None:
        self.identity = "a1" * 16
        self.loads: list[str] = []
        self.registry = Registry()
        self.info = WorkerInfo(PeerRef("w", 1), Role.BOTH, "a:1", FACTS, 8, 4, 8, 16, "cpu", "fake")
        self.registry.register(self.info)
        super().__init__(self.registry, cast(Any, None), self.list_of(allowed=True), cast(Any, None))
        controller.adapter_changes = self
        self._controller = controller

    def list_of(self, *, allowed: bool) -> Adapters:
        return Adapters(self.registry, self, allowed=allowed, model_names=("fake",))

    async def adapters_in_use(self, _info: WorkerInfo) -> Collection[str]:
        return ()

    async def load_adapter(self, info: WorkerInfo, adapter: AdapterFacts, _in_use: Collection[str]) -> AdapterFacts:
        self.loads.append(adapter.name)
        loaded = replace(adapter, identity=self.identity)
        self._register((*info.model.adapters, loaded))
        return loaded

    async def unload_adapter(self, info: WorkerInfo, name: str) -> None:
        self._register(tuple(adapter for adapter in info.model.adapters if adapter.name != name))

    def _register(self, adapters: tuple[AdapterFacts, ...]) -> None:
        self.info = replace(self.info, model=replace(self.info.model, adapters=adapters))
        self.registry.register(self.info)

    async def follow(self) -> None:
        """Publishes the list in the router's membership."""
        async for membership in self.registry.watch():
            async with self._controller.changed:
                self._controller.adapters = membership.adapters
                self._controller.revision += 1
                self._controller.changed.notify_all()


@pytest.fixture
async def loading(cluster: Cluster) -> AsyncIterator[Loading]:
    made = Loading(cluster.controller)
    running = [asyncio.ensure_future(made.follow()), asyncio.ensure_future(made._adapters.run())]
    yield made
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@pytest.fixture
async def http(cluster: Cluster, loading: Loading) -> AsyncIterator[httpx.AsyncClient]:
    url, headers = f"http://{cluster.endpoints.http_address}", {"authorization": "Bearer ops-key"}
    async with httpx.AsyncClient(base_url=url, headers=headers) as opened:
        yield opened


def names(reply: httpx.Response) -> list[str]:
    return [card["id"] for card in reply.json()["data"]]


async def test_requests_may_name_an_adapter_while_it_is_loaded(
    cluster: Cluster, loading: Loading, http: httpx.AsyncClient
) -> None:
    for identity in ("a1" * 16, "b2" * 16):
        loading.identity = identity
        reply = await http.post(LOAD, json=SQL)
        assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        assert reply.headers["content-type"].startswith("text/plain")
        assert names(await http.get("/v1/models")) == ["fake", "sql"]
        reply = await http.post("/v1/completions", json=PROMPT | {"model": "sql"})
        assert (reply.status_code, reply.json()["model"]) == (200, "sql")
        tasks = cluster.prefill.prefills[-1], cluster.decode.reservations[-1]
        assert [task.adapter for task in tasks] == [identity] * 2
        assert identity in tasks[0].cache_salt, "another adapter of the name finds none of its cached pages"
        reply = await http.post(UNLOAD, json={"lora_name": "sql"})
        assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert names(await http.get("/v1/models")) == ["fake"]
        assert (await http.post("/v1/completions", json=PROMPT | {"model": "sql"})).status_code == 404


async def test_a_request_that_runs_is_finished(cluster: Cluster, http: httpx.AsyncClient) -> None:
    await http.post(LOAD, json=SQL)
    cluster.decode.switches.held_at = 2
    asking = asyncio.create_task(http.post("/v1/completions", json=PROMPT | {"model": "sql"}))
    await until(lambda: len(cluster.decode.reservations) == 1, "it runs")
    assert (await http.post(UNLOAD, json={"lora_name": "sql"})).status_code == 200
    cluster.decode.go.set()
    reply = await asking
    assert (reply.status_code, reply.json()["usage"]["completion_tokens"], reply.json()["model"]) == (200, 4, "sql")


async def test_over_grpc(cluster: Cluster, http: httpx.AsyncClient) -> None:
    async with channel_to(cluster.endpoints.grpc_address, "ops-key") as channel:
        stub = Client(channel).stub
        reply = await stub.LoadAdapter(types_pb2.LoadAdapterRequest(**SQL))
        assert (reply.adapter.name, reply.adapter.path) == ("sql", "/adapters/sql")
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert list(info.adapters) == [reply.adapter]
        with pytest.raises(grpc.aio.AioRpcError, match="lora_name: 'sql' is loaded already"):
            await stub.LoadAdapter(types_pb2.LoadAdapterRequest(**SQL))
        await stub.UnloadAdapter(types_pb2.UnloadAdapterRequest(lora_name="sql"))
        assert not (await stub.GetModelInfo(pb.GetModelInfoRequest())).adapters
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.UnloadAdapter(types_pb2.UnloadAdapterRequest(lora_name="sql"))
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND


async def test_for_operators_alone(cluster: Cluster, loading: Loading, http: httpx.AsyncClient) -> None:
    for key, status in (("tenant-key", 403), ("reads-key", 403), ("unknown", 401), ("", 401)):
        headers = {"authorization": f"Bearer {key}" if key else ""}
        for path, body in ((LOAD, SQL), (UNLOAD, {"lora_name": "sql"})):
            reply = await http.post(path, json=body, headers=headers)
            assert reply.status_code == status, (key, path)
    async with channel_to(cluster.endpoints.grpc_address, "tenant-key") as channel:
        stub = Client(channel).stub
        for call in (
            stub.LoadAdapter(types_pb2.LoadAdapterRequest(**SQL)),
            stub.UnloadAdapter(types_pb2.UnloadAdapterRequest(lora_name="sql")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call
            assert failure.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert not loading.loads


async def test_bad_bodies_and_failures(cluster: Cluster, loading: Loading, http: httpx.AsyncClient) -> None:
    for body, field in (
        ({}, "lora_name"),
        ({"lora_name": "sql"}, "lora_path"),
        ({"lora_name": 3, "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "sql", "lora_path": ""}, "lora_path"),
        ({"lora_name": "fake", "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "sql", "lora_path": "a"}, "lora_path"),
    ):
        reply = await http.post(LOAD, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), body
    assert (await http.post(LOAD, content=b"[]")).status_code == 400
    reply = await http.post(UNLOAD, json={"lora_name": "sql"})
    assert (reply.status_code, "'sql' is not loaded" in reply.text) == (404, True)
    loading._adapters = loading.list_of(allowed=False)
    reply = await http.post(LOAD, json=SQL)
    assert reply.status_code == 412
    assert "--allow-runtime-lora-updating" in reply.text
    await cluster.controller.stop()
    reply = await http.post(LOAD, json=SQL)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")


async def test_the_audit_log_names_the_client_that_loaded_an_adapter(
    cluster: Cluster, http: httpx.AsyncClient, settings: dict[str, Any]
) -> None:
    await http.post(LOAD, json=SQL)
    await http.post(UNLOAD, json={"lora_name": "sql"}, headers={"authorization": "Bearer tenant-key"})
    log = settings["audit_log"]
    await until(lambda: len(log.read_text().splitlines()) == 2, "both are written")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    shown = [(record["tenant"], record["endpoint"], record["model"], record["status"]) for record in records]
    assert shown == [("ops", f"POST {LOAD}", "sql", 200), ("", f"POST {UNLOAD}", "", 403)]


async def test_the_page_of_routes_has_both(http: httpx.AsyncClient) -> None:
    page = (await http.get("/openapi.json")).json()
    for path, model in ((LOAD, "LoadLoraAdapterRequest"), (UNLOAD, "UnloadLoraAdapterRequest")):
        schema = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{model}"}
        assert "lora_name" in page["components"]["schemas"][model]["required"]


async def test_a_router_that_starts_later_knows_them(cluster: Cluster, http: httpx.AsyncClient) -> None:
    """The list comes with the membership, also to a router whose workers have others, or none yet."""
    await http.post(LOAD, json=SQL)
    pool = cluster.router._dispatcher.pool
    assert [adapter.name for adapter in pool.adapters] == ["sql"]
    for worker in cluster.workers:
        worker.adapters = (AdapterFacts("other", "c3" * 16, "/other"),)
    await cluster.members(*cluster.workers)
    assert names(await http.get("/v1/models")) == ["fake", "sql"]
