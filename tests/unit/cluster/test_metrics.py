"""The cluster-wide metrics at one address, including the processes that do not respond."""

import json
import re
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.cluster.metrics import ClusterMetrics
from tandem.cluster.supervision.health import Health, Phase
from tandem.metrics import families as f
from tandem.metrics.exposition import Exposition
from tandem.metrics.metrics_server import DISCOVERY_PATH, METRICS_PATH, MetricsServer, fetch, metrics_page
from tandem.metrics.registry import Registry
from tandem.net.security.credentials import metrics_key_of
from tandem.protocol.errors import Unavailable
from tests.stranger import Stranger

ROOT = Path(__file__).parents[3]
TOKEN, KEY = "of the cluster", "of the operator"
UP = Health("decode-0", Phase.SERVING, 7, 1, 2, "")


async def worker(name: str) -> tuple[MetricsServer, str]:
    registry = Registry({"model": "m", "worker": name})
    registry.counter(f.PREEMPTIONS).add()
    listener = MetricsServer({METRICS_PATH: metrics_page(Exposition(registry))}, frozenset({metrics_key_of(TOKEN)}))
    return listener, await listener.open("127.0.0.1")


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ClusterMetrics]:
    monkeypatch.setattr("tandem.cluster.metrics._TARGET_S", 60.0)
    kept = [("router", replace(UP, name="router")), ("decode", UP), ("decode", replace(UP, name="decode-1"))]
    metrics = ClusterMetrics("m", TOKEN, frozenset({KEY}), lambda: kept, lambda: {"decode-0": "prefill"})
    metrics.address = await metrics.open("127.0.0.1", 0)  # type: ignore[attr-defined]
    yield metrics
    await metrics.close()


async def samples(cluster: ClusterMetrics) -> dict[tuple[str, str], tuple[str, float]]:
    """Returns the samples as (name, worker) → (role, value)."""
    text = await fetch(cluster.address, METRICS_PATH, KEY, timeout_s=60.0)  # type: ignore[attr-defined]
    parsed = [sample for metric in text_string_to_metric_families(text) for sample in metric.samples]
    return {(sample.name, sample.labels["worker"]): (sample.labels.get("role", ""), sample.value) for sample in parsed}


async def test_all_that_answer(cluster: ClusterMetrics) -> None:
    listeners = []
    for name in ("decode-0", "decode-1"):
        listener, address = await worker(name)
        listeners.append(listener)
        cluster.opened(name, "decode", address)
    values = await samples(cluster)
    for name in ("decode-0", "decode-1"):
        assert values["tandem_num_preemptions_total", name] == ("", 1)
        assert values["tandem_metrics_target_up", name][1] == 1
    # Roles are those of now, where they are known.
    assert values["tandem_process_up", "decode-0"] == ("prefill", 1)
    assert values["tandem_process_up", "decode-1"] == ("decode", 1)
    assert values["tandem_process_restarts_total", "decode-1"] == ("", 2)
    assert ("tandem_metrics_target_up", "router") not in values
    assert values["process_resident_memory_bytes", "controller"][1] > 0
    await listeners[0].close()
    values = await samples(cluster)
    assert values["tandem_metrics_target_up", "decode-0"][1] == 0
    assert ("tandem_num_preemptions_total", "decode-0") not in values
    assert values["tandem_num_preemptions_total", "decode-1"][1] == 1
    cluster.gone("decode-0")
    values = await samples(cluster)
    assert ("tandem_metrics_target_up", "decode-0") not in values
    await listeners[1].close()


async def test_health_is_read_on_the_event_loop() -> None:
    """Health is read on the event loop, because a concurrent change elsewhere would fail the page."""
    asked: list[threading.Thread] = []

    def kept() -> list[tuple[str, Health]]:
        asked.append(threading.current_thread())
        return [("decode", UP)]

    def roles() -> dict[str, str]:
        asked.append(threading.current_thread())
        return {}

    metrics = ClusterMetrics("m", TOKEN, frozenset(), kept, roles)
    assert 'role="decode"' in await metrics.text()
    assert set(asked) == {threading.current_thread()}


async def test_a_stranger_at_the_port_of_an_ended_process_does_not_receive_the_token(cluster: ClusterMetrics) -> None:
    stranger = await Stranger().start()
    cluster.opened("decode-0", "decode", stranger.address)
    await cluster.text()
    assert stranger.connections == 1
    assert TOKEN.encode() not in stranger.received
    await stranger.stop()


async def test_who_scrapes_each_process_keeps_what_the_controller_alone_says(cluster: ClusterMetrics) -> None:
    listener, address = await worker("decode-0")
    cluster.opened("decode-0", "decode", address)
    every = {name for name, _ in await samples(cluster) if name.startswith("tandem_")}
    for file in (
        "docs/operations/metrics.md",
        "deploy/helm/tandem/templates/monitoring.yaml",
        "deploy/prometheus/server.py",
    ):
        (kept,) = re.findall(r"\[__name__\], regex: (\S+), action: keep", (ROOT / file).read_text())
        dropped = {name for name in every if not re.fullmatch(kept, name)}
        assert dropped == {"tandem_num_preemptions_total"}, file
    await listener.close()


async def test_who_is_there(cluster: ClusterMetrics) -> None:
    cluster.opened("decode-0", "decode", "10.0.0.1:7")
    cluster.opened("router", "router", "[::1]:8000")
    groups = json.loads(await fetch(cluster.address, DISCOVERY_PATH, KEY, timeout_s=60.0))  # type: ignore[attr-defined]
    assert groups == [
        {"targets": [address], "labels": {"__meta_tandem_worker": name, "__meta_tandem_role": role}}
        for name, role, address in (("decode-0", "prefill", "10.0.0.1:7"), ("router", "router", "[::1]:8000"))
    ]
    for path in (METRICS_PATH, DISCOVERY_PATH):
        with pytest.raises(Unavailable, match="401"):
            await fetch(cluster.address, path, timeout_s=60.0)  # type: ignore[attr-defined]
