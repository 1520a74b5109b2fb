"""`tandem up`: each option's effect on the cluster's settings."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cli.connection.router import Sampling
from tandem.cli.main import app
from tandem.cli.start.serving import FirstPrompt
from tandem.settings.ceilings import parse_ceilings
from tandem.settings.cluster import ClusterSettings
from tandem.settings.engine import GIB
from tandem.settings.listeners import ListenerLimits
from tandem.settings.planner import Limits, PlannerMode, PlannerSettings, Range
from tandem.settings.setting import fields_by_name
from tandem.settings.slo import parse_class, with_defaults

KEY, SECRET = "k" * 32, "s" * 32
OPTIONS: dict[str, tuple[str, Any]] = {
    "--model /m": ("model", Path("/m")),
    "--served-model-name big --served-model-name big-latest": ("served_model_names", ("big", "big-latest")),
    "--tokenizer /": ("tokenizer", Path("/")),
    "--chat-template tool_use": ("chat_template", "tool_use"),
    "--generation-config none": ("generation_config", "none"),
    "--max-model-len 4096": ("max_model_len", 4096),
    "--lora sql=/a --lora org/poems=/b=c": ("loras", (("sql", Path("/a")), ("org/poems", Path("/b=c")))),
    "--max-loras 3": ("max_loras", 3),
    "--max-lora-rank 128": ("max_lora_rank", 128),
    "--mode disaggregated": ("mode", "disaggregated"),
    "--prefill 3": ("prefill", 3),
    "--decode 5": ("decode", 5),
    "--step-policy chunked": ("step_policy", "chunked"),
    "--step-budget 77": ("step_budget", 77),
    "--itl-target-ms 12.5": ("itl_target_s", 0.0125),
    "--device cuda": ("device", "cuda"),
    "--dtype bfloat16": ("dtype", "bfloat16"),
    "--quantization int8": ("quantization", "int8"),
    "--prefill-quantization fp8": ("prefill_quantization", "fp8"),
    "--decode-quantization int4": ("decode_quantization", "int4"),
    "--page-tokens 64": ("page_tokens", 64),
    "--kv-cache-gib 3.5": ("kv_cache_bytes", int(3.5 * GIB)),
    "--kv-host-gib 1.5": ("kv_host_bytes", int(1.5 * GIB)),
    "--kv-disk-gib 9 --kv-disk-path /kv": ("kv_disk_bytes", 9 * GIB),
    "--memory-fraction 0.7": ("memory_fraction", 0.7),
    "--max-step-tokens 999": ("max_step_tokens", 999),
    "--max-batch-requests 33": ("max_batch_requests", 33),
    "--no-prefix-cache": ("prefix_cache", False),
    "--speculate draft": ("speculate", "draft"),
    "--draft /d": ("draft", Path("/d")),
    "--kv-checksum-rate 0.2": ("kv_checksum_rate", 0.2),
    "--kv-lease 7": ("kv_lease_s", 7.0),
    "--kv-transfer-deadline 44": ("kv_transfer_deadline_s", 44.0),
    "--kv-quarantine-share 0.3": ("kv_quarantine_share", 0.3),
    "--device-ceilings 900:3000": ("ceilings", parse_ceilings("", "900:3000")),
    "--threads 2": ("threads", 2),
    "--address h:1": ("ray_address", "h:1"),
    "--places-timeout 9": ("places_timeout_s", 9.0),
    "--start-timeout 99": ("start_timeout_s", 99.0),
    "--stop-grace 9": ("stop_grace_s", 9.0),
    "--worker-silence 9": ("worker_silence_s", 9.0),
    "--recovery-timeout 9": ("recovery_timeout_s", 9.0),
    "--planner dry-run --planner-window 22 --planner-workers 2:8 --planner-prefill 1:3 --planner-decode 1:4": (
        "planner",
        PlannerSettings(PlannerMode.DRY_RUN, 22.0, Limits(Range(1, 3), Range(1, 4), Range(2, 8))),
    ),
    "--host 1.2.3.4": ("host", "1.2.3.4"),
    "--insecure": ("insecure", True),
    "--grpc-port 1001": ("grpc_port", 1001),
    "--http-port 1002": ("http_port", 1002),
    "--metrics-port 1003": ("metrics_port", 1003),
    "--controller-port 1004": ("controller_port", 1004),
    "--workers-outlive 9": ("outlive_s", 9.0),
    "--cluster-name north": ("cluster_name", "north"),
    f"--token {SECRET}": ("token", SECRET),
    f"--metrics-key {KEY}": ("metrics_key", KEY),
    "--otlp-endpoint http://a:4": ("otlp_endpoint", "http://a:4"),
    "--open-picker-metrics": ("open_picker_metrics", True),
    "--kv-events-endpoint tcp://*:5557": ("kv_events_endpoint", "tcp://*:5557"),
    "--kv-events-replay-endpoint tcp://*:5558": ("kv_events_replay_endpoint", "tcp://*:5558"),
    "--kv-events-topic kv@a@b": ("kv_events_topic", "kv@a@b"),
    "--log-format json": ("log_format", "json"),
    "--log-max-mib 3": ("log_max_mib", 3),
    "--allowed-origins https://a --allowed-origins http://b:8": ("allowed_origins", ("https://a", "http://b:8")),
    "--max-messages 9": ("max_messages", 9),
    "--max-request-bytes 1 --max-connections 2 --max-calls 3 --header-timeout 4 --body-timeout 5 --idle-timeout 6 "
    "--unread-timeout 7 --keepalive 8": ("listeners", ListenerLimits(1, 2, 3, 4.0, 5.0, 6.0, 7.0, 8.0)),
    "--tool-call-parser mistral": ("tool_call_parser", "mistral"),
    "--reasoning-parser none": ("reasoning_parser", "none"),
    "--strict-requests": ("strict_requests", True),
    "--slo-class gold:100:20": ("slo_classes", with_defaults([parse_class("gold:100:20")])),
    "--default-max-tokens 9": ("default_max_tokens", 9),
    "--default-slo-class gold": ("default_slo_class", "gold"),
    f"--api-key {KEY} --api-key {SECRET}": ("api_keys", (KEY, SECRET)),
}


def value_of(settings: ClusterSettings, name: str) -> object:
    """Returns a setting by its field's name, or a property of the settings."""
    path, _ = fields_by_name(ClusterSettings).get(name, (name, None))
    value: object = attrgetter(path)(settings)
    return value


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records config, model, first prompt and `once` of each requested cluster."""
    asked: list[Any] = []
    monkeypatch.setattr(
        "tandem.cli.start.serving.serve",
        lambda config, model, first, *, once: asked.extend((config, model, first, once)),
    )
    return asked


def up(*options: str) -> None:
    assert CliRunner().invoke(app, ["up", *(word for option in options for word in option.split())]).exit_code == 0


def test_each_option_sets_what_it_names(served: list[Any]) -> None:
    up(*OPTIONS, "--prompt hi", "--max-tokens 7", "--temperature 0.5", "--once")
    config, *rest = served
    assert {name: value_of(config, name) for name, _ in OPTIONS.values()} == dict(OPTIONS.values())
    assert rest == [Path("/m"), FirstPrompt("hi", Sampling(7, 0.5)), True]


def test_without_options_the_settings_are_their_own_defaults(served: list[Any]) -> None:
    up()
    assert served == [ClusterSettings.of(Path()), None, None, False]


@pytest.mark.parametrize("option", ["--tool-call-parser", "--reasoning-parser"])
def test_an_unknown_parser_is_refused_before_anything_starts(served: list[Any], option: str) -> None:
    run = CliRunner().invoke(app, ["up", option, "hermez"])
    assert run.exit_code != 0
    assert f"{option}: 'hermez' is not one of auto, none, " in run.output
    assert served == []


def test_the_other_modes_have_workers(served: list[Any]) -> None:
    up("--mode adaptive", "--workers 4")
    assert (served[0].router.mode, served[0].workers) == ("adaptive", 4)


def test_random_weights_are_a_models_shape(served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cli.models.random_model.random_model", lambda shape: Path("/cache") / shape)
    up("--random-weights llama-3-8b")
    config, model, *_ = served
    assert (config.engine.random_weights, model) == (True, Path("/cache/llama-3-8b"))


def test_secrets_come_from_files_too(served: list[Any], tmp_path: Path) -> None:
    for name, text in (
        ("keys", f"{KEY}  # of one client\n\n# nobody's\nk2 k3\n"),
        ("token", f"{SECRET}\n"),
        ("m", "mk"),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    files = f"--api-key-file {tmp_path}/keys", f"--token-file {tmp_path}/token", f"--metrics-key-file {tmp_path}/m"
    up("--api-key k2", "--api-key k0", *files)
    config = served[0]
    assert (config.router.api_keys, config.secrets.token, config.secrets.metrics_key) == (("k2", "k0"), SECRET, "mk")
    assert config.router.api_key_file == tmp_path / "keys", "the router reads it, again whenever it changes"
    served.clear()
    up("--token other", *files)
    assert served[0].secrets.token == "other", "what is given by hand is taken"


@pytest.mark.parametrize("option", ["--max-messages", "--max-calls", "--header-timeout", "--keepalive"])
def test_limits_are_above_0_and_named_by_their_options(served: list[Any], option: str) -> None:
    result = CliRunner().invoke(app, ["up", option, "0"])
    assert result.exit_code
    assert option in result.output
    assert not served
