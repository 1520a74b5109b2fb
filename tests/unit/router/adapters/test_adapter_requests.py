"""Adapters as clients see them: chosen by the model's name, listed, and kept through attempts and in cache salts."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.requests.picker_metrics import PICKER_PATH
from router.requests.validation import find_adapter
from tandem.protocol.errors import Unavailable
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.messages import AdapterFacts
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import until

PROMPT = {"prompt": "Hello", "max_tokens": 8}
SQL, POEMS = AdapterFacts("sql", "a1" * 16, "/adapters/sql"), AdapterFacts("org/poems", "b2" * 16, "/adapters/poems")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"audit_log": tmp_path / "audit.jsonl"}


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    for worker in cluster.workers:
        worker.adapters = (SQL, POEMS)
    await cluster.members(*cluster.workers)
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}/v1") as client:
        yield client


async def test_the_models_name_chooses(cluster: Cluster, http: httpx.AsyncClient, stub: Any) -> None:
    for name, identity in (("fake", ""), ("sql", SQL.identity), ("org/poems", POEMS.identity)):
        reply = await http.post("/completions", json=PROMPT | {"model": name})
        assert (reply.status_code, reply.json()["model"]) == (200, name)
        messages = [{"role": "user", "content": "Hello"}]
        reply = await http.post("/chat/completions", json={"messages": messages, "max_tokens": 8, "model": name})
        assert (reply.status_code, reply.json()["model"]) == (200, name)
        async for _ in stub.Generate(
            pb.GenerateRequest(model=name, text="Hello", options=pb.GenerationOptions(max_tokens=2))
        ):
            pass
        asked = [*cluster.prefill.prefills[-3:], *cluster.decode.reservations[-3:]]
        assert [task.adapter for task in asked] == [identity] * 6


async def test_each_adapter_has_a_cache_salt_of_its_own(cluster: Cluster, http: httpx.AsyncClient) -> None:
    for name in ("fake", "sql", "org/poems"):
        for salt in ("", "mine"):
            await http.post("/completions", json=PROMPT | {"model": name, "cache_salt": salt})
    salts = [task.cache_salt for task in cluster.prefill.prefills]
    assert len(set(salts)) == len(salts) == 6
    assert salts == [reservation.cache_salt for reservation in cluster.decode.reservations]


async def test_a_salt_cannot_name_an_adapter(cluster: Cluster, http: httpx.AsyncClient) -> None:
    await http.post("/completions", json=PROMPT | {"model": "sql"})
    stolen = cluster.prefill.prefills[-1].cache_salt
    await http.post("/completions", json=PROMPT | {"model": "fake", "cache_salt": stolen})
    assert cluster.prefill.prefills[-1].cache_salt != stolen


async def test_a_later_attempt_keeps_the_adapter(cluster: Cluster, http: httpx.AsyncClient) -> None:
    cluster.decode.switches.give_up_after = 3
    reply = await http.post("/completions", json=PROMPT | {"model": "sql"})
    assert reply.json()["usage"]["completion_tokens"] == 8
    assert len(cluster.prefill.prefills) > 1, "it was not continued"
    assert {task.adapter for task in cluster.prefill.prefills} == {SQL.identity}
    assert {task.adapter for task in cluster.decode.reservations} == {SQL.identity}
    assert len({task.cache_salt for task in cluster.prefill.prefills}) == 1


async def test_they_are_listed(http: httpx.AsyncClient, cluster: Cluster) -> None:
    cards = (await http.get("/models")).json()["data"]
    shown = [(card["id"], card["root"], card["parent"]) for card in cards]
    assert shown == [
        ("fake", str(cluster.config.served.model), None),
        ("sql", "/adapters/sql", "fake"),
        ("org/poems", "/adapters/poems", "fake"),
    ]
    assert (await http.get("/models/org/poems")).json() == cards[2]
    assert cards[1]["max_model_len"] == cards[0]["max_model_len"]


async def test_an_endpoint_picker_reads_their_names(cluster: Cluster, http: httpx.AsyncClient) -> None:
    text = (await http.get(f"http://{cluster.endpoints.http_address}{PICKER_PATH}")).text
    metrics = {metric.name: metric for metric in text_string_to_metric_families(text)}
    (sample,) = metrics["vllm:lora_requests_info"].samples
    names = {"max_lora": "2", "running_lora_adapters": "sql,org/poems", "waiting_lora_adapters": ""}
    assert sample.labels == {"model_name": "fake", **names}


async def test_another_name_is_not_found(http: httpx.AsyncClient, stub: Any) -> None:
    for reply in (await http.post("/completions", json=PROMPT | {"model": "sq"}), await http.get("/models/sq")):
        assert reply.status_code == 404
        assert "'sq' is not served here; this router serves 'fake' or 'sql' or 'org/poems'" in reply.text
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(pb.GenerateRequest(model="sq", text="Hello")):
            pass
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_router_that_knows_no_worker_yet_calls_no_name_wrong(cluster: Cluster) -> None:
    assert find_adapter("fake", cluster.config, None) is None
    with pytest.raises(Unavailable, match="the cluster is starting"):
        find_adapter("sql", cluster.config, None)


async def test_text_of_an_adapter_is_tokenized(http: httpx.AsyncClient, cluster: Cluster) -> None:
    url = f"http://{cluster.endpoints.http_address}/tokenize"
    replies = [(await http.post(url, json={"model": name, "prompt": "Hello"})).json() for name in ("fake", "sql")]
    assert replies[0] == replies[1]


async def test_the_audit_log_and_traces_name_the_adapter(cluster: Cluster, http: httpx.AsyncClient) -> None:
    """Regression: both named the base model, so that nobody could see who used an adapter."""
    for name in ("sql", "fake"):
        await http.post("/completions", json=PROMPT | {"model": name})
    assert [trace.model for trace in cluster.router._dispatcher.metrics.traces.newest()] == ["fake", "sql"]
    log = cluster.config.audit_log
    assert log is not None
    await until(lambda: len(log.read_text().splitlines()) == 2, "both are written")
    assert [json.loads(line)["model"] for line in log.read_text().splitlines()] == ["sql", "fake"]
