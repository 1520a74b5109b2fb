"""`tandem up`: what each option becomes in the cluster's settings."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.client import Sampling
from cli.main import app
from cli.serving import FirstPrompt
from cluster.config import GIB, ClusterConfig
from cluster.planner_config import PlannerConfig, PlannerMode
from costs.roofline import parse_ceilings
from planner.decision import Limits, Range
from router.slo import parse_class, with_defaults

KEY, SECRET = "k" * 32, "s" * 32
OPTIONS: dict[str, tuple[str, Any]] = {
    "--model /m": ("model", Path("/m")),
    "--mode disaggregated": ("mode", "disaggregated"),
    "--prefill 3": ("prefill", 3),
    "--decode 5": ("decode", 5),
    "--step-policy chunked": ("step_policy", "chunked"),
    "--step-budget 77": ("step_budget", 77),
    "--itl-target-ms 12.5": ("itl_target_s", 0.0125),
    "--device cuda": ("device", "cuda"),
    "--dtype bfloat16": ("dtype", "bfloat16"),
    "--page-tokens 64": ("page_tokens", 64),
    "--kv-cache-gib 3.5": ("kv_cache_bytes", int(3.5 * GIB)),
    "--memory-fraction 0.7": ("memory_fraction", 0.7),
    "--max-step-tokens 999": ("max_step_tokens", 999),
    "--max-batch-requests 33": ("max_batch_requests", 33),
    "--no-prefix-cache": ("prefix_cache", False),
    "--kv-checksum-rate 0.2": ("kv_checksum_rate", 0.2),
    "--kv-direction read": ("kv_direction", "read"),
    "--kv-lease 7": ("kv_lease_s", 7.0),
    "--kv-transfer-deadline 44": ("kv_transfer_deadline_s", 44.0),
    "--kv-quarantine-share 0.3": ("kv_quarantine_share", 0.3),
    "--device-ceilings 900:3000": ("ceilings", parse_ceilings("", "900:3000")),
    "--threads 2": ("threads", 2),
    "--address h:1": ("ray_address", "h:1"),
    "--places-timeout 9": ("places_timeout_s", 9.0),
    "--start-timeout 99": ("start_timeout_s", 99.0),
    "--stop-grace 9": ("stop_grace_s", 9.0),
    "--planner dry-run --planner-window 22 --planner-workers 2:8 --planner-prefill 1:3 --planner-decode 1:4": (
        "planner",
        PlannerConfig(PlannerMode.DRY_RUN, 22.0, Limits(Range(1, 3), Range(1, 4), Range(2, 8))),
    ),
    "--host 1.2.3.4": ("host", "1.2.3.4"),
    "--grpc-port 1001": ("grpc_port", 1001),
    "--http-port 1002": ("http_port", 1002),
    "--metrics-port 1003": ("metrics_port", 1003),
    "--controller-port 1004": ("controller_port", 1004),
    "--workers-outlive 9": ("workers_outlive_s", 9.0),
    "--cluster-name north": ("cluster_name", "north"),
    f"--token {SECRET}": ("token", SECRET),
    f"--metrics-key {KEY}": ("metrics_key", KEY),
    "--otlp-endpoint http://a:4": ("otlp_endpoint", "http://a:4"),
    "--log-format json": ("log_format", "json"),
    "--front-processes 2": ("front_processes", 2),
    "--slo-class gold:100:20": ("slo_classes", with_defaults([parse_class("gold:100:20")])),
    "--default-slo-class gold": ("default_slo_class", "gold"),
    f"--api-key {KEY} --api-key {SECRET}": ("api_keys", (KEY, SECRET)),
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Config, model, first prompt and whether to end after it, of each cluster that was asked for."""
    asked: list[Any] = []
    monkeypatch.setattr(
        "cli.serving.serve", lambda config, model, first, *, once: asked.extend((config, model, first, once))
    )
    return asked


def up(*options: str) -> None:
    assert CliRunner().invoke(app, ["up", *(word for each in options for word in each.split())]).exit_code == 0


def test_each_option_sets_what_it_names(served: list[Any]) -> None:
    up(*OPTIONS, "--prompt hi", "--max-tokens 7", "--temperature 0.5", "--once")
    config, *rest = served
    assert {name: getattr(config, name) for name, _ in OPTIONS.values()} == dict(OPTIONS.values())
    assert rest == [Path("/m"), FirstPrompt("hi", Sampling(7, 0.5)), True]


def test_without_options_the_settings_are_their_own_defaults(served: list[Any]) -> None:
    up()
    assert served == [ClusterConfig(Path()), None, None, False]


def test_the_other_modes_have_workers(served: list[Any]) -> None:
    up("--mode adaptive", "--workers 4")
    assert (served[0].mode, served[0].workers) == ("adaptive", 4)


def test_random_weights_are_a_models_shape(served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.random_model.random_model", lambda shape: Path("/cache") / shape)
    up("--random-weights llama-3-8b")
    config, model, *_ = served
    assert (config.random_weights, model) == (True, Path("/cache/llama-3-8b"))
