"""The router's config follows the cluster's settings."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig
from cluster.ray_processes.router_actor import RouterProcess
from router.config import RouterConfig

GIVEN: dict[str, Any] = {
    "default_max_tokens": 9,
    "model_aliases": ("m-latest",),
    "tokenizer": Path("/models/t"),
    "chat_template": "{{ messages }}",
    "generation_config": "none",
    "front_processes": 2,
    "metrics_key": "m" * 32,
    "http_port": 8001,
    "grpc_port": 8002,
}


def test_settings_of_one_name_are_passed_on() -> None:
    cluster = ClusterConfig(model=Path("/models/m"), **GIVEN)
    told = RouterProcess(cluster, "secret")._config(3)
    shared = {each.name for each in fields(RouterConfig)} & {each.name for each in fields(ClusterConfig)}
    shared -= {"token", "model_name"}
    assert shared >= GIVEN.keys()
    assert {name: getattr(told, name) for name in shared} == {name: getattr(cluster, name) for name in shared}
