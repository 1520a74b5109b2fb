"""Settings of `tandem up` from a file and the environment, vLLM's names, and `tandem serve MODEL`."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tandem.cli.main
from tandem.cli.main import app
from tandem.cli.start.setting_options import OPTIONS as ALL
from tandem.settings.cluster import ClusterSettings
from tests.unit.cli.test_up import OPTIONS, served, value_of

__all__ = ["served"]


def given() -> dict[str, list[str]]:
    """Returns the options of `test_up` as lists of values by name; a switch has none."""
    words_of: dict[str, list[str]] = {}
    for word in (word for option in OPTIONS for word in option.split()):
        if word.startswith("--"):
            last = words_of.setdefault(word, [])
        else:
            last.append(word)
    return words_of


def as_file(path: Path, *, dash: str) -> Path:
    """Writes these options as YAML, a switch as true or false."""
    lines = []
    for name, values in given().items():
        key = name.removeprefix("--").removeprefix("no-").replace("-", dash)
        value = not name.startswith("--no-") if not values else values[0] if len(values) == 1 else values
        lines.append(f"{key}: {json.dumps(value)}")
    path.write_text("\n".join(lines))
    return path


def run(*words: str, command: str = "up", **env: str) -> Any:
    return CliRunner().invoke(app, [command, *words], env=env)


def assert_all(served: list[Any]) -> None:
    assert {name: value_of(served[0], name) for name, _ in OPTIONS.values()} == dict(OPTIONS.values())


@pytest.mark.parametrize("dash", ["-", "_"])
def test_each_option_can_be_in_the_file(served: list[Any], tmp_path: Path, dash: str) -> None:
    assert run("--config", str(as_file(tmp_path / "tandem.yaml", dash=dash))).exit_code == 0
    assert_all(served)


def test_each_option_can_be_in_the_environment(served: list[Any]) -> None:
    env = {}
    for name, values in given().items():
        key = "TANDEM_" + name.removeprefix("--").removeprefix("no-").replace("-", "_").upper()
        env[key] = " ".join(values) if values else str(not name.startswith("--no-"))
    renamed = {"TANDEM_ADDRESS": "TANDEM_RAY_ADDRESS", "TANDEM_TOKEN": "TANDEM_CLUSTER_TOKEN"}
    assert run(**{renamed.get(name, name): value for name, value in env.items()}).exit_code == 0
    assert_all(served)


def test_a_clients_address_does_not_join_a_ray_cluster(served: list[Any]) -> None:
    assert run(TANDEM_ADDRESS="1.2.3.4:50051").exit_code == 0
    assert served[0].ray_address == ""


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(
    served: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text("http-port: 7\ngrpc-port: 8\nmetrics_port: 1\napi-key: [" + "f" * 32 + "]\n")
    config = f"--config {tmp_path}/a.yaml"
    env = {"TANDEM_HTTP_PORT": "2", "TANDEM_GRPC_PORT": "4"}
    assert run(*shlex.split(f"{config} --http-port 3"), **env).exit_code == 0
    assert (served[0].router.http_port, served[0].router.grpc_port, served[0].metrics_port) == (3, 4, 1)
    assert served[0].router.api_keys == ("f" * 32,)
    served.clear()
    assert run(**env, TANDEM_CONFIG=str(tmp_path / "a.yaml")).exit_code == 0
    assert (served[0].router.http_port, served[0].metrics_port) == (2, 1)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("http-prot: 1", "http-prot, which is no option; did you mean http-port?"),
        ("http-port: many", "--http-port"),
        ("http-port: [1, 2]", "http-port"),
        ("http-port: {a: 1}", "http-port"),
        ("http-port: 1\nport: 2", "port"),
        ("config: b.yaml", "config"),
        ("- http-port", "no settings"),
        ("a: [", "cannot be read"),
        ("3: 4", "3"),
    ],
)
def test_a_wrong_file_is_named(served: list[Any], tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    result = run("--config", str(tmp_path / "a.yaml"))
    assert result.exit_code == 2
    assert named in re.sub(r"[│\s]+", " ", result.output)
    assert not served


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TANDEM_HTTP_PROT", "TANDEM_HTTP_PORT"),
        ("TANDEM_MAX_MODEL_LENGTH", "TANDEM_MAX_MODEL_LEN"),
        ("TANDEM_GPU_MEMORY_UTILIZATION", "TANDEM_MEMORY_FRACTION"),
        ("TANDEM_RAY_ADRESS", "TANDEM_RAY_ADDRESS"),
        *((f"TANDEM_{name}", "") for name in ("PORT", "SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT_8000_TCP_PORT")),
        *((f"TANDEM_{name}", "") for name in ("ADDRESS", "CONTROLLER", "STATE_DIR", "TLS_CA", "SMOLLM")),
    ],
)
def test_a_misspelled_variable_is_refused_as_a_setting_in_a_file_is(served: list[Any], name: str, meant: str) -> None:
    result = run(**{name: "7"})
    shown = re.sub(r"[│\s]+", " ", result.output)
    assert (result.exit_code, bool(served)) == ((2, False) if meant else (0, True)), shown
    assert not meant or f"{name}: is no setting; did you mean {meant}?" in shown


def test_help_names_aliases_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("up", "serve"):
        shown = re.sub(r"[│\s]+", " ", run("--help-all", command=command).output)
        for option in ALL.values():
            assert all(f"name: {alias}" in shown for alias in option.setting.aliases), command
        assert "--memory-fraction <float>" in shown


def test_a_missing_file_is_named_and_an_empty_one_says_nothing(served: list[Any], tmp_path: Path) -> None:
    assert run("--config", str(tmp_path / "none.yaml")).exit_code == 2
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert run("--config", str(tmp_path / "empty.yaml")).exit_code == 0
    assert served[0].router.http_port == ClusterSettings.of(Path()).router.http_port


def test_vllms_names_are_understood(served: list[Any], tmp_path: Path) -> None:
    words = "--port 81 --gpu-memory-utilization 0.5 --block-size 64 --max-num-batched-tokens 99 --max-num-seqs 7"
    assert run(*words.split(), "--no-enable-prefix-caching").exit_code == 0
    config = served[0]
    assert (config.router.http_port, config.engine.memory_fraction, config.engine.page_tokens) == (81, 0.5, 64)
    assert (config.engine.max_step_tokens, config.engine.max_batch_requests, config.worker.prefix_cache) == (
        99,
        7,
        False,
    )
    served.clear()
    (tmp_path / "a.yaml").write_text("port: 82\nmax-num-seqs: 8\nenable_prefix_caching: false\n")
    assert run("--config", str(tmp_path / "a.yaml"), "--enable-prefix-caching").exit_code == 0
    assert (served[0].router.http_port, served[0].engine.max_batch_requests, served[0].worker.prefix_cache) == (
        82,
        8,
        True,
    )


def test_a_model_may_have_several_names(served: list[Any], tmp_path: Path) -> None:
    words = "/m --served-model-name big big-latest --port 0 --max-model-len 9"
    assert run(*words.split(), command="serve").exit_code == 0
    assert (served[1], served[0].served.names) == (Path("/m"), ("big", "big-latest"))
    assert (served[0].router.http_port, served[0].engine.max_model_len) == (0, 9)
    served.clear()
    (tmp_path / "a.yaml").write_text("served-model-name: [a, b]\n")
    assert run("--config", str(tmp_path / "a.yaml")).exit_code == 0
    assert served[0].served.names == ("a", "b")
    for names in (["a", "a"], [""]):
        refused = run("--served-model-name", *names)
        assert refused.exit_code == 2
        assert "give each model name once" in refused.output


def test_adapters_have_vllms_names_too(served: list[Any], tmp_path: Path) -> None:
    wanted = (("sql", Path("/a")), ("poems", Path("/b")))
    assert run(*["/m", "--lora-modules", "sql=/a", "poems=/b", "--max-loras", "2"], command="serve").exit_code == 0
    assert (served[0].engine.loras, served[0].engine.max_loras) == (wanted, 2)
    served.clear()
    (tmp_path / "a.yaml").write_text("lora: [sql=/a, poems=/b]\n")
    assert run("--config", str(tmp_path / "a.yaml")).exit_code == 0
    assert served[0].engine.loras == wanted
    for given, reason in ((["sql"], "is not NAME=PATH"), (["=/a"], "is not NAME=PATH"), (["a=/a", "a=/b"], "twice")):
        refused = run(*(word for adapter in given for word in ("--lora", adapter)))
        assert refused.exit_code == 2
        assert reason in refused.output


def test_serve_takes_the_model_as_an_argument(served: list[Any], tmp_path: Path) -> None:
    assert run("/m", "--port", "0", command="serve", TANDEM_MODEL="/other").exit_code == 0
    assert served[:2] == [served[0], Path("/m")]
    assert served[0].served.model == Path("/m")
    served.clear()
    (tmp_path / "a.yaml").write_text("model: /n\n")
    assert run("--config", str(tmp_path / "a.yaml"), command="serve").exit_code == 0
    assert served[1] == Path("/n")
    served.clear()
    twice = run("/m", "--model", "/n", command="serve")
    assert (twice.exit_code, served) == (2, [])
    assert "twice" in twice.output


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(tandem.cli.main.app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("tandem ")
