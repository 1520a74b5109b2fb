"""One `tandem up` from its first line to its last: check, prepare, start, answer, serve, stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import psutil
from rich.console import Console
from rich.markup import escape

from cli import state
from cli.answering import answer_one
from cli.checks import host_problem, port_problem
from cli.client import RouterClient, Sampling
from cli.default_model import NAME, find_default_model
from cli.start_view import StartView
from cli.timeline_table import timeline_table
from cluster.config import ClusterConfig
from cluster.launcher import Cluster, Endpoints
from router.tokenizer import Tokenizer
from wire.address import address_of, is_loopback
from wire.errors import InvalidArgument

GIB = 1 << 30
STOPPED = "[dim]stopped; nothing is left running[/]"


@dataclass(frozen=True, slots=True)
class FirstPrompt:
    """What to answer as soon as the cluster serves, and how."""

    text: str
    sampling: Sampling


def serve(config: ClusterConfig, model: Path | None, first: FirstPrompt | None, *, once: bool) -> None:
    """Start `config` with `model` (None: the small one) and serve until a signal, or `once` until `first` is answered.

    Raises a TandemError that says what is wrong, KeyboardInterrupt for a signal before it serves. Whatever happens,
    nothing of the cluster is left behind.
    """
    console = Console(highlight=False, soft_wrap=True)
    with _one_interrupt():
        _check_ports(config)
        _check_memory(config)
        _warn_if_open(config)
        try:
            with StartView(console) as view:
                config = _with_model(config, model, view)
                cluster = Cluster.start(config, view.cluster_progress)
        except KeyboardInterrupt:
            console.print(STOPPED)
            raise
        try:
            _serve(console, cluster, config, first, once)
        finally:
            _ignore_signals()
            console.print("[dim]stopping …[/]")
            cluster.stop()
            console.print(STOPPED)


def _serve(console: Console, cluster: Cluster, config: ClusterConfig, first: FirstPrompt | None, once: bool) -> None:
    ends = cluster.endpoints
    announced = state.announce(ends.grpc, ends.http, config.model_name)
    try:
        if first is not None:
            _answer(console, config, ends, first)
        if not once:
            with suppress(KeyboardInterrupt):
                console.print(_endpoints(config, ends), markup=False)
                cluster.wait()
    finally:
        announced.unlink(missing_ok=True)


def _answer(console: Console, config: ClusterConfig, ends: Endpoints, first: FirstPrompt) -> None:
    """Stream the first answer and show where its time went."""
    console.print(f"\n{first.text}\n", style="bold", markup=False)
    client = RouterClient(ends.grpc, config.api_keys[0] if config.api_keys else "")
    answer = answer_one(client, first.text, first.sampling)
    console.print()
    console.print(timeline_table(answer))


def _endpoints(config: ClusterConfig, ends: Endpoints) -> str:
    return (
        f"\n{config.model_name} is served at\n"
        f'  gRPC    {ends.grpc}  (tandem.v1.Inference; try: tandem generate "Hello")\n'
        f"  OpenAI  http://{ends.http.removeprefix('http://')}/v1\n"
        "Ctrl-C stops it."
    )


def _with_model(config: ClusterConfig, model: Path | None, view: StartView) -> ClusterConfig:
    """The config with a checked model folder and the name clients use."""
    path = model or find_default_model()
    with view.step(f"checking {path.name}") as progress:
        from engine.weights.gguf import prepare_model

        folder = prepare_model(path, progress=progress)
        _check_device(config)
        if path.is_dir():
            Tokenizer(path)  # what a GGUF file is converted to has one
    name = NAME if model is None else path.stem if path.is_file() else path.resolve().name
    return replace(config, model=folder, model_name=name)


def _check_ports(config: ClusterConfig) -> None:
    """InvalidArgument that names the option of an address that is not this machine's or of a port that is taken."""
    if (problem := host_problem(config.host)) is not None:
        raise InvalidArgument(
            "--host",
            f"cannot listen on {config.host!r} ({problem}); give an address of this machine, 127.0.0.1 for instance",
        )
    for option, port in (("--grpc-port", config.grpc_port), ("--http-port", config.http_port)):
        problem = port_problem(config.host, port)
        if problem is not None:
            raise InvalidArgument(
                option,
                f"cannot listen on {address_of(config.host, port)} ({problem}); "
                "choose another port, or 0 for any free one",
            )


def _check_device(config: ClusterConfig) -> None:
    """InvalidArgument if the workers would find no GPU."""
    if config.device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise InvalidArgument("--device", f"{config.device} asked for, PyTorch sees no GPU; use --device cpu")


def _check_memory(config: ClusterConfig) -> None:
    """InvalidArgument if the workers' KV pages together are more than the host has. A GPU's memory is its worker's
    to check."""
    if config.device != "cpu":
        return
    workers = config.prefill + config.decode
    each, free = config.kv_cache_bytes / GIB, psutil.virtual_memory().available / GIB
    if workers * each > free:
        raise InvalidArgument(
            "--kv-cache-gib",
            f"{workers} workers with {each:g} GiB each do not fit into the {free:.2f} GiB of memory that are free; "
            f"choose less than {free / workers:.2f}",
        )


def _warn_if_open(config: ClusterConfig) -> None:
    """A line on stderr where strangers could use the cluster."""
    if not config.api_keys and not is_loopback(config.host):
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"[bold red]warning: --host {escape(config.host)} lets everyone who reaches this machine use the cluster; "
            "set --api-key (or TANDEM_API_KEY) so that clients must show a key[/]"
        )


@contextmanager
def _one_interrupt() -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP is a KeyboardInterrupt, the rest are ignored: clearing up is not interrupted.

    Set even where the parent ignored SIGINT, as shells do for jobs in the background.
    """
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, _interrupt) for number in watched}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: object) -> NoReturn:
    _ignore_signals()
    raise KeyboardInterrupt


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
