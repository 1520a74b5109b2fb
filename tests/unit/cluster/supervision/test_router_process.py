"""The router's config follows the cluster's settings, and its process may outlive the controller."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tandem.cluster.ray_processes.ray_process import RayProcess
from tandem.cluster.ray_processes.router_actor import RouterProcess
from tandem.settings.cluster import ClusterSettings
from tandem.settings.router import CPU_CHUNKS_PER_S, GPU_CHUNKS_PER_S
from tandem.settings.secrets import Secrets

GIVEN: dict[str, Any] = {
    "default_max_tokens": 9,
    "served_model_names": ("m", "m-latest"),
    "tokenizer": Path("/models/t"),
    "chat_template": "{{ messages }}",
    "generation_config": "none",
    "metrics_key": "m" * 32,
    "http_port": 8001,
    "grpc_port": 8002,
}


def test_settings_of_one_name_are_passed_on() -> None:
    cluster = ClusterSettings.of(model=Path("/models/m"), **GIVEN)
    router_config = RouterProcess(cluster, "secret")._config(3)
    assert router_config.values().items() >= cluster.router.values().items()
    assert router_config.served == cluster.served
    assert router_config.secrets == Secrets("secret", GIVEN["metrics_key"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, CPU_CHUNKS_PER_S), ({"device": "cuda"}, GPU_CHUNKS_PER_S), ({"chunks_per_s": 7.0}, 7.0)],
)
def test_a_router_sends_fewer_chunks_beside_engines_on_cpus_unless_a_setting_says_otherwise(
    given: dict[str, Any], expected: float
) -> None:
    assert RouterProcess(ClusterSettings.of(Path("m"), **given), "t")._config(0).chunk_rate == expected


async def test_a_controller_that_replaces_a_dead_one_adopts_its_router_and_ends_other_routers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A standby of the dead controller is one; routers of another `tandem up` on the same Ray are not touched."""
    actors = {name: MagicMock() for name in ("router-1-7", "router-1-9", "router-12-9", "decode-0-9")}
    killed: list[object] = []

    def find(name: str) -> MagicMock:
        if name not in actors:
            raise ValueError(name)
        return actors[name]

    monkeypatch.setattr("ray.util.list_named_actors", lambda: list(actors))
    monkeypatch.setattr("ray.get_actor", find)
    monkeypatch.setattr("ray.kill", lambda actor, **_: killed.append(actor))
    router = RouterProcess(ClusterSettings.of(Path("m")), "t", 1)
    process = await router.adopt(7)
    assert isinstance(process, RayProcess)
    assert process._actor is actors["router-1-7"]
    assert killed == [actors["router-1-9"]]
    assert await router.adopt(8) is None


def test_a_router_starts_on_the_ports_of_the_one_before_it() -> None:
    router = RouterProcess(ClusterSettings.of(Path("m"), grpc_port=0, http_port=0), "t")
    router.listeners = "127.0.0.1:5001", "127.0.0.1:5002", ""
    config = router._config(3)
    assert (config.grpc_port, config.http_port, config.operations_port) == (5001, 5002, 0)
