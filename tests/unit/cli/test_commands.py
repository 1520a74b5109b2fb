"""The commands as a shell sees them: one line of error, an exit code, and no heavy imports for --help."""

import inspect
import json
import re
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from router.config import RouterConfig
from tandem.cli.connection import state
from tandem.cli.connection.router import Sampling
from tandem.cli.main import app
from tandem.cli.plain_errors import plain_errors
from tandem.cli.start.preflight import check_memory, check_page, check_weights, warn_of_slow_pages
from tandem.engine.cache.paged_cache import cache_bytes
from tandem.engine.models.allocation import weight_bytes
from tandem.engine.models.load_spec import load_spec
from tandem.protocol.errors import InvalidArgument, ModelError, ResourceExhausted, TandemError, Unavailable
from tandem.settings.cluster import ClusterSettings
from tandem.settings.engine import CPU_KV_CACHE_BYTES
from tandem.settings.model import ModelSettings
from tests.factories import write_tiny_model

ANY_PORTS = ["--grpc-port", "0", "--http-port", "0"]


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(state.FOLDER_VARIABLE, str(tmp_path / "state"))
    monkeypatch.setattr("tandem.cluster.ray_processes.temp_folder.temp_root", lambda: tmp_path)


@pytest.mark.parametrize("command", [["status"], ["generate", "x"], ["chat"]])
def test_without_a_cluster_the_way_to_start_one_is_named(command: list[str]) -> None:
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 4
    assert result.stderr == "error: no cluster is running; start one with `tandem up`\n"


@pytest.mark.parametrize("command", [["status"], ["generate", "x"], ["chat"]])
def test_of_several_keys_in_the_environment_the_first_is_shown(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tandem up` in a pod has them all in its environment, which other commands there share."""
    shown: list[str] = []

    def remember(_client: object, _address: str, *, api_key: str = "", **_: object) -> None:
        shown.append(api_key)
        raise Unavailable("enough")

    monkeypatch.setattr("tandem.client.Client.__init__", remember)
    monkeypatch.setenv("TANDEM_API_KEY", "first second")
    assert "enough" in CliRunner().invoke(app, [*command, "--address", "127.0.0.1:1"]).stderr
    CliRunner().invoke(app, [*command, "--address", "127.0.0.1:1", "--api-key", "third fourth"])
    assert shown == ["first", "third fourth"], "what is given by hand is taken as it is"


def test_down_without_a_cluster_is_no_failure() -> None:
    result = CliRunner().invoke(app, ["down"])
    assert result.exit_code == 0
    assert "no cluster is running" in result.stdout


def test_down_clears_up_after_a_killed_cluster(tmp_path: Path) -> None:
    killed = tmp_path / "tandem-killed"
    killed.mkdir()
    (killed / "lock").write_text("1")
    result = CliRunner().invoke(app, ["down"])
    assert (result.exit_code, result.stdout) == (0, "cleaned up after 1 killed cluster\n")
    assert not killed.exists()


def test_down_goes_on_where_one_cluster_does_not_end() -> None:
    """The newest cluster, stopped first, ignores signals; the others end, and the command fails and says so."""
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    processes = [announced(f"model-{number}", first) for number, first in enumerate(("", "", deaf))]
    try:
        result = CliRunner().invoke(app, ["down", "--all", "--timeout", "0.1"])
        assert result.exit_code == 1
        stays = processes[-1].pid
        assert result.stderr == f"error: process {stays} did not end within 0.1 s; stop with `kill -9 {stays}`\n"
        assert [line.split()[5] for line in result.stdout.splitlines()] == ["model-1", "model-0"]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def announced(model: str, first: str) -> subprocess.Popen[bytes]:
    """Starts a process that is a cluster by its state file alone; it ends slowly, or ignores signals if it is deaf."""
    # A shell's background job, and so whatever it starts, ignores SIGINT unless told otherwise.
    first_lines = "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    pipe, script = subprocess.PIPE, f"{first_lines}\n{first}\nprint(flush=True)\nsys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdout
    process.stdout.readline()
    started, grace_s = psutil.Process(process.pid).create_time(), 0.0 if first else 60.0
    one = state.RunningCluster(process.pid, started, "r:1", "r:2", model, stop_grace_s=grace_s)
    state.folder().mkdir(parents=True, exist_ok=True)
    (state.folder() / f"up-{process.pid}.json").write_text(json.dumps(asdict(one)))
    return process


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--address", "somewhere"], "--address: 'somewhere' is neither auto nor HOST:PORT"),
        (["--address", "r:1", "--cluster-name", "a b"], "--cluster-name: 'a b' is not made of letters"),
        (["--address", "r:1", "--all"], "--all: is for clusters of this host"),
        (["--cluster-name", "other"], "--cluster-name: is for workers on a Ray that was joined; add its --address"),
    ],
)
def test_what_down_cannot_mean_is_refused(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["down", *options])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {words}")


def test_down_says_that_a_ray_cluster_cannot_be_joined() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # it does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = CliRunner().invoke(app, ["down", "--address", address])
    assert result.exit_code == 4
    assert result.stderr.startswith(f"error: no Ray cluster answers at {address}")


@pytest.mark.parametrize("option", ["--grpc-port", "--http-port", "--metrics-port"])
def test_a_taken_port_names_its_option(option: str) -> None:
    ports = {"--grpc-port": "0", "--http-port": "0"}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = [word for pair in (ports | {option: str(port)}).items() for word in pair]
        result = CliRunner().invoke(app, ["up", *options])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {option}: cannot listen on 127.0.0.1:{port}")
    assert result.stderr.count("\n") == 1


WRONG_NUMBERS = [
    ("--max-tokens", "0", "1 and 2147483647"),
    ("--max-tokens", "5000000000", "1 and 2147483647"),
    ("--temperature", "nan", "0 and 100"),
]
WRONG_SEEDS = [("--seed", seed, "0 and 18446744073709551615") for seed in ("-1", "99999999999999999999")]


@pytest.mark.parametrize(
    ("command", "option", "value", "limits"),
    [
        *((["up", "--prompt", "hi"], *wrong) for wrong in WRONG_NUMBERS),
        *((["generate", "hi"], *wrong) for wrong in WRONG_NUMBERS + WRONG_SEEDS),
        *((["chat"], *wrong) for wrong in WRONG_NUMBERS + WRONG_SEEDS),
    ],
)
def test_a_number_out_of_its_range_names_option_and_limits(
    command: list[str], option: str, value: str, limits: str
) -> None:
    result = CliRunner().invoke(app, [*command, option, value])
    assert (result.exit_code, result.stderr) == (2, f"error: {option}: {value} is not between {limits}\n")


@pytest.mark.parametrize(
    ("command", "name"),
    [(["generate", ""], "PROMPT"), (["up", "--prompt", "", "--once"], "--prompt"), (["up", "--model", ""], "--model")],
)
def test_an_empty_argument_is_refused_before_anything_starts(command: list[str], name: str) -> None:
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {name}: is empty; give a ")


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_a_prompt_is_read_from_a_pipe(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "tandem.cli.requests.answering.answer_one", lambda _client, prompt, _sampling, **_: asked.append(prompt)
    )
    result = CliRunner().invoke(app, ["generate", *arguments, "--address", "r:1"], input="Grüße\n")
    assert (result.exit_code, asked) == (0, ["Grüße"])
    empty = CliRunner().invoke(app, ["generate", *arguments, "--address", "r:1"], input="")
    assert (empty.exit_code, empty.stderr.startswith("error: PROMPT: is empty; ")) == (2, True)


def test_answers_are_greedy_by_default() -> None:
    assert Sampling().options()["temperature"] == 0.0
    for command in ("up", "generate", "chat"):
        callback = next(
            registered.callback for registered in app.registered_commands if registered.callback.__name__ == command
        )
        assert inspect.signature(callback).parameters["temperature"].default == 0.0


def test_chat_sends_neither_nothing_nor_an_unknown_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cli.requests.chat._turn", lambda *_: pytest.fail("sent"))
    result = CliRunner().invoke(app, ["chat", "--address", "127.0.0.1:1"], input="\n/help me\n/exit\n")
    assert result.exit_code == 0
    assert "the prompt is empty" in result.stdout
    assert "/help is no command: /clear forgets" in result.stdout


@pytest.mark.parametrize("host", ["no host", "192.0.2.77", ""])
def test_a_host_that_is_not_this_machine_names_its_option(host: str) -> None:
    result = CliRunner().invoke(app, ["up", "--host", host])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: --host: cannot listen on {host!r} (")
    assert result.stderr.count("\n") == 1


def test_a_missing_gpu_is_reported_before_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("tandem.cli.start.serving.Cluster", None)
    model = write_tiny_model(tmp_path / "tiny")
    result = CliRunner().invoke(app, ["up", "--model", str(model), "--device", "cuda", *ANY_PORTS])
    assert result.exit_code == 2
    assert result.stderr == "error: --device: cuda requested, PyTorch sees no GPU; use --device cpu\n"


def test_a_model_without_tokenizer_is_reported_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.cli.start.serving.Cluster", None)
    model = write_tiny_model(tmp_path / "tiny")
    (model / "tokenizer.json").unlink(missing_ok=True)
    result = CliRunner().invoke(app, ["up", "--model", str(model), *ANY_PORTS])
    assert result.exit_code == 3
    assert result.stderr.startswith(f"error: {model} has no tokenizer: none of tokenizer.json, ")


def test_a_wrong_option_is_named() -> None:
    result = CliRunner().invoke(app, ["up", "--decode", "0"])
    assert result.exit_code == 2
    assert result.stderr == "error: --decode: 0 is not between 1 and 64\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mode", "disaggregated", "--workers", "2"], "--workers: is for --mode colocated or adaptive"),
        (
            ["--prefill", "1", "--workers", "2"],
            "--workers: is for workers that do both; give it, or --prefill and --decode",
        ),
        (["--mode", "colocated", "--prefill", "2"], "--prefill: is for --mode disaggregated"),
        (["--mode", "mixed"], "--mode: 'mixed' is not one of disaggregated, colocated, adaptive, auto"),
    ],
)
def test_each_mode_has_workers_of_its_own(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["up", *options])
    assert (result.exit_code, result.stderr) == (2, f"error: {message}\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--grpc-port", "70000"], "--grpc-port: 70000 is not a port (0 to 65535)"),
        (["--http-port", "-1"], "--http-port: -1 is not a port (0 to 65535)"),
        (["--grpc-port", "8000"], "--http-port: 8000 is --grpc-port too; each listener needs a port of its own"),
    ],
)
@pytest.mark.parametrize("command", ["up", "doctor"])
def test_a_number_that_is_no_port_of_its_own_is_named(command: str, options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [command, *options])
    assert (result.exit_code, result.stderr) == (2, f"error: {message}\n")


@pytest.mark.parametrize("option", ["--grpc-port", "--http-port"])
def test_the_doctor_fails_at_a_taken_port(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cli.diagnosis.checks.check_transfer", list)
    other = "--http-port" if option == "--grpc-port" else "--grpc-port"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["doctor", option, str(port), other, "0"])
    assert result.exit_code == 1
    assert f"fail port {port}: address already in use" in result.stdout


def test_the_doctor_fails_at_a_host_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cli.diagnosis.checks.check_transfer", list)
    result = CliRunner().invoke(app, ["doctor", "--host", "nosuch.invalid", *ANY_PORTS])
    assert result.exit_code == 1
    assert "fail host 'nosuch.invalid': " in result.stdout


@pytest.mark.parametrize("command", [["up"], ["generate", "hi"], ["chat"]])
@pytest.mark.parametrize("key", ["é", "two words"])
def test_a_key_that_no_header_carries_is_refused_by_name(command: list[str], key: str) -> None:
    address = [] if command == ["up"] else ["--address", "127.0.0.1:1"]
    result = CliRunner().invoke(app, [*command, *address, "--api-key", key])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --api-key: must be ASCII ")
    assert result.stderr.count("\n") == 1


def test_an_empty_key_opens_no_cluster() -> None:
    for keys in (["--api-key", ""], ["--api-key", "good", "--api-key", ""]):
        result = CliRunner().invoke(app, ["up", *keys, *ANY_PORTS])
        assert result.exit_code == 2
        assert result.stderr.startswith("error: --api-key: is empty, ")


@pytest.mark.parametrize("device", ["cpu:7", "cuda:x", "cuda:", "gpu"])
def test_an_unknown_device_is_refused_with_the_known_ones(device: str) -> None:
    result = CliRunner().invoke(app, ["up", "--device", device, *ANY_PORTS])
    assert (result.exit_code, result.stderr) == (
        2,
        f"error: --device: {device!r} is not one of auto, cpu, cuda and cuda:N\n",
    )


def test_a_gpu_past_the_last_is_reported_before_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("tandem.cli.start.serving.Cluster", None)
    model = write_tiny_model(tmp_path / "tiny")
    result = CliRunner().invoke(app, ["up", "--model", str(model), "--device", "cuda:2", *ANY_PORTS])
    assert result.exit_code == 2
    assert result.stderr == "error: --device: cuda:2 requested, PyTorch sees cuda:0 to cuda:1 alone\n"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"page_tokens": 64}, "warning: --page-tokens 64 slows prompts down on GPUs; 128 is the fast size\n"),
        ({"page_tokens": 128}, ""),
        ({}, ""),
        ({"page_tokens": 64, "dtype": "float32"}, ""),
        ({"page_tokens": 64, "device": "cpu"}, ""),
    ],
)
def test_pages_that_slow_a_gpu_down_are_reported_with_the_better_size(
    settings: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_slow_pages(ClusterSettings.of(**({"model": Path("nowhere"), "device": "cuda"} | settings)))
    assert capsys.readouterr().err == said


def test_slow_pages_are_reported_before_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("tandem.cli.start.serving.Cluster", None)
    model = ["--model", str(write_tiny_model(tmp_path / "tiny"))]
    result = CliRunner().invoke(app, ["up", *model, "--device", "cuda", "--page-tokens", "7", *ANY_PORTS])
    assert result.stderr.startswith("warning: --page-tokens 7 slows prompts down on GPUs; 128 is")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--kv-disk-gib 1", "--kv-disk-gib: needs --kv-disk-path PATH"),
        ("--kv-disk-path here", "--kv-disk-path: needs --kv-disk-gib"),
        ("--kv-host-gib -1", "--kv-host-gib: -1 is not between 0 and"),
        ("--kv-host-gib 1 --no-prefix-cache", "--kv-host-gib: needs the prefix cache"),
        ("--kv-host-gib 1 --tensor-parallel-size 2", "--kv-host-gib: is for workers of one GPU"),
        (
            "--kv-host-gib 100000",
            r"--kv-host-gib: 1 workers with 100000 GiB each exceed the \S+ GiB of free host memory",
        ),
        ("--kv-disk-gib 1000000 --kv-disk-path here", r"--kv-disk-gib: 1 workers with 1e\+06 GiB each exceed"),
        ("--kv-disk-gib 1 --kv-disk-path /proc/kv", r"--kv-disk-path: /proc/kv cannot be written"),
    ],
)
def test_tiers_that_cannot_be_are_refused_before_ray_starts(
    options: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tandem.cli.start.serving.Cluster", None)
    result = CliRunner().invoke(app, ["up", *options.split(), *ANY_PORTS])
    assert result.exit_code
    assert re.match(f"error: {message}", result.stderr), result.stderr


def test_a_page_of_random_weights_is_sized_without_any(tmp_path: Path) -> None:
    large: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
    model = write_tiny_model(tmp_path / "tiny", torch_dtype=None, dtype=None, **large)
    (model / "model.safetensors").unlink()
    config = ClusterSettings.of(model=model, device="cuda", kv_cache_bytes=1 << 20, page_tokens=1, random_weights=True)
    check_page(config)
    two_pages = 2 * 3 * 2 * 8 * 128 * 128 * 2
    check_page(config.with_fields(kv_cache_bytes=two_pages, page_tokens=128))
    with pytest.raises(InvalidArgument, match="hold no page of 128 tokens"):
        check_page(config.with_fields(kv_cache_bytes=two_pages - 1, page_tokens=128))
    with pytest.raises(InvalidArgument, match="hold no page of 1024 tokens"):
        check_page(config.with_fields(page_tokens=1024))


def test_a_cache_that_holds_no_page_is_reported_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.cli.start.serving.Cluster", None)
    model = write_tiny_model(tmp_path / "tiny", hidden_size=1024, num_attention_heads=8, num_key_value_heads=8)
    result = CliRunner().invoke(
        app, ["up", "--model", str(model), "--kv-cache-gib", "0.001", "--page-tokens", "1024", *ANY_PORTS]
    )
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --kv-cache-gib: 0.001 GiB hold no page of 1024 tokens, which takes ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("size", ["1000000", "1e300", "0", "-1", "inf", "nan"])
def test_a_cache_larger_than_the_memory_names_its_option(size: str) -> None:
    result = CliRunner().invoke(app, ["up", "--kv-cache-gib", size, "--grpc-port", "0", "--http-port", "0"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --kv-cache-gib: ")
    assert result.stderr.count("\n") == 1
    assert size != "1000000" or "GiB of memory that are free; choose less than " in result.stderr


def test_other_hosts_memory_is_not_judged_by_this_one() -> None:
    here = ClusterSettings.of(model=Path("m"), kv_cache_bytes=1 << 49)
    with pytest.raises(InvalidArgument, match="--kv-cache-gib"):
        check_memory(here)
    check_memory(here.with_fields(ray_address="auto"))


def test_weights_larger_than_the_memory_are_reported_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.cli.start.serving.Cluster", None)
    model = write_tiny_model(tmp_path / "tiny")
    large = {"num_hidden_layers": 1000, "intermediate_size": 1 << 20}
    deep = json.loads((model / "config.json").read_text()) | large
    (model / "config.json").write_text(json.dumps(deep))
    monkeypatch.setattr("tandem.cli.models.random_model.random_model", lambda _: model)
    result = CliRunner().invoke(app, ["up", "--random-weights", "x", "--kv-cache-gib", "0.1", *ANY_PORTS])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --device: 2 workers with ")
    assert " and 0.1 GiB of KV cache each do not fit into the " in result.stderr
    advice = "use --device cuda, another --dtype, less --kv-cache-gib or a smaller model\n"
    assert f"GiB of memory that are free; {advice}" in result.stderr


def test_all_workers_weights_count_where_they_lie_in_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    config = ClusterSettings.of(model=model, prefill=2, decode=1)
    one = weight_bytes(load_spec(model), torch.float32)
    available = [3 * (one + CPU_KV_CACHE_BYTES)]
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=available[0]))
    check_weights(config)
    available[0] -= 1
    with pytest.raises(
        InvalidArgument, match=r"3 workers with 0\.00 GiB of weights a worker and 1 GiB of KV cache each"
    ):
        check_weights(config)
    check_weights(config.with_fields(dtype="bfloat16"))
    check_weights(config.with_fields(kv_cache_bytes=CPU_KV_CACHE_BYTES // 2))
    check_weights(config.with_fields(device="cuda"))
    check_weights(config.with_fields(ray_address="auto"))


def test_the_memory_of_drafts_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = write_tiny_model(tmp_path / "tiny"), write_tiny_model(tmp_path / "draft", num_hidden_layers=1)
    config = ClusterSettings.of(
        model=model, prefill=1, decode=1, kv_cache_bytes=1 << 20, speculate="draft", draft=draft
    )
    folder_bytes = sum(weight_bytes(load_spec(folder), torch.float32) for folder in (model, draft))
    available = [2 * (folder_bytes + (1 << 20))]
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=available[0]))
    check_weights(config)
    available[0] -= 1
    with pytest.raises(InvalidArgument, match=r"2 workers with .* do not fit"):
        check_weights(config)
    check_weights(config.with_fields(speculate="ngram", draft=None))
    page = cache_bytes(load_spec(model), 1, 1024, torch.float32)
    config = config.with_fields(kv_cache_bytes=page, page_tokens=1024)
    check_page(config.with_fields(speculate="ngram", draft=None))
    with pytest.raises(InvalidArgument, match="without the part of the drafts, hold no page of 1024 tokens"):
        check_page(config)


def broken_models(tmp_path: Path) -> dict[str, Path]:
    no_config = tmp_path / "no_config"
    no_config.mkdir()
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    not_gguf = tmp_path / "model.gguf"
    not_gguf.write_bytes(b"hello")
    return {"missing": tmp_path / "missing", "no_config": no_config, "strange": strange, "not_gguf": not_gguf}


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_host_that_others_reach_needs_keys_or_a_word(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cli.start.serving.Cluster", None)
    result = CliRunner().invoke(app, ["up", "--grpc-port", "0", "--http-port", "0", "--host", host])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: --host: {host} lets everyone who reaches it use the cluster without a key")
    assert "--api-key-file, or --insecure" in result.stderr
    with pytest.raises(InvalidArgument, match=r"host: .* without a key"):
        RouterConfig("router-0", ModelSettings(Path("m"), ("m",)), "127.0.0.1:1", host=host)
    RouterConfig("router-0", ModelSettings(Path("m"), ("m",)), "127.0.0.1:1", host=host, insecure=True)
    RouterConfig("router-0", ModelSettings(Path("m"), ("m",)), "127.0.0.1:1", host=host, api_keys=("k",))


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (["--host", "0.0.0.0", "--insecure"], True),
        (["--host", "::", "--insecure"], True),
        (["--host", "0.0.0.0", "--api-key", "k"], False),
        (["--host", "::1"], False),
    ],
)
def test_an_open_listener_without_a_key_is_warned_of(options: list[str], *, warned: bool, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    result = CliRunner().invoke(app, ["up", "--model", missing, "--grpc-port", "0", "--http-port", "0", *options])
    assert result.exit_code == 3, "it ends at the missing model"
    assert result.stderr.startswith(f"warning: --host {options[1]} ") is warned
    assert ("set --api-key" in result.stderr) is warned


@pytest.mark.parametrize("kind", ["missing", "no_config", "strange", "not_gguf"])
def test_a_model_that_cannot_be_served_is_one_sentence(kind: str, tmp_path: Path) -> None:
    path = broken_models(tmp_path)[kind]
    result = CliRunner().invoke(app, ["up", "--model", str(path), "--grpc-port", "0", "--http-port", "0"])
    assert result.exit_code == 3
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert path.name in result.stderr
    assert ("does not exist; give a folder" in result.stderr) is (kind == "missing")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgument("--x", "is wrong"), 2),
        (ModelError("m is broken"), 3),
        (Unavailable("gone"), 4),
        (ResourceExhausted("full"), 1),
    ],
)
def test_exit_codes(error: TandemError, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    from typer import Exit

    @plain_errors
    def command() -> None:
        raise error

    with pytest.raises(Exit) as failure:
        command()
    assert failure.value.exit_code == code
    assert capsys.readouterr().err == f"error: {error.message}\n"


def test_help_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'ray', 'grpc', 'numpy', 'fastapi', 'transformers'}"
    script = (
        "import sys, tandem.cli.main, click.testing\n"
        "from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(tandem.cli.main.app, ['--help']).exit_code == 0\n"
        f"print({heavy} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
