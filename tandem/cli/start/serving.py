"""The stages of `tandem up`: check, prepare, start, answer the first prompt, serve, stop."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from router.text.chat_template_files import read_template
from router.text.tokenizer import Tokenizer
from tandem.cli.connection import state
from tandem.cli.connection.router import Sampling, router_client, tls_of
from tandem.cli.connection.secret_files import first_key
from tandem.cli.models.default_model import NAME, TEMPLATE, find_default_model
from tandem.cli.models.hub_model import hub_model
from tandem.cli.observe.log_folder import new_log_folder
from tandem.cli.progress import each_part
from tandem.cli.requests.answering import answer_one
from tandem.cli.requests.timeline_table import timeline_table
from tandem.cli.start.preflight import (
    check_device,
    check_draft,
    check_listeners,
    check_loras,
    check_memory,
    check_network,
    check_page,
    check_tiers,
    check_weights,
    warn_if_open,
    warn_of_slow_pages,
)
from tandem.cluster.launcher import Cluster, Endpoints
from tandem.cluster.launcher import Progress as ClusterProgress
from tandem.engine.kernels.cpu.compile_ahead import compiling_ahead
from tandem.engine.weights.gguf_parts import model_name
from tandem.protocol.errors import InvalidArgument, TandemError
from tandem.settings.cluster import ClusterSettings
from tandem.settings.setting import AUTO


class StartView:
    """Prints the progress of each step of the start: a line per step on a terminal, otherwise a line per event.

    Use it as a context manager. All threads may call its methods.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._began: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._done: set[str] = set()
        self._details: set[tuple[str, str]] = set()
        """The steps with what they have done so far; a step may do the same several times."""
        self._closed = False
        self._live = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "StartView":
        self._live.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        self._live.stop()
        self._closed = True

    @property
    def on_terminal(self) -> bool:
        """True if lines are updated in place; else each report of progress is a line of its own."""
        return self._console.is_terminal

    @contextmanager
    def step(self, what: str) -> Iterator[Callable[[str, float], None]]:
        """Show the step `what` while the body runs; yield a function that reports a text and a fraction (0 to 1)."""
        self.report(what)
        yield lambda detail, fraction: self.report(what, detail=detail, fraction=fraction)
        self.report(what, done=True)

    def cluster_progress(self, event: ClusterProgress) -> None:
        """Show the progress of the cluster's start and, after the start, which processes died or serve again."""
        if event.note:
            self._console.print(f"[yellow]{escape(event.note)}[/]")
            return
        if self._closed:
            again = "serves again" if event.done else f"is gone ({event.detail}); restarting it"
            self._console.print(f"[yellow]{event.name} {again}[/]")
            return
        self.report(f"starting {event.name}", done=event.done, detail=event.detail, fraction=event.fraction)

    def report(self, what: str, *, done: bool = False, detail: str = "", fraction: float = 0.0) -> None:
        """Create or update the line of the step `what`."""
        with self._lock:
            if what not in self._began:
                self._began[what] = time.monotonic()
                self._tasks[what] = self._live.add_task(what, total=None)
                self._say(f"… {what}")
            if what in self._done:
                return
            if done:
                self._done.add(what)
                self._live.update(self._tasks[what], total=1, completed=1, description=what)
                self._say(f"✓ {what} ({time.monotonic() - self._began[what]:.1f} s)")
            elif detail:
                self._live.update(self._tasks[what], total=1, completed=fraction, description=f"{what}: {detail}")
                if (what, detail) not in self._details:
                    self._details.add((what, detail))
                    self._say(f"… {what}: {detail}")

    def _say(self, line: str) -> None:
        """Print a line if the output is not a terminal, where lines cannot be updated in place."""
        if not self._console.is_terminal:
            self._console.print(line)
            sys.stdout.flush()


STOPPED = "[dim]stopped; nothing is left running[/]"
NOT_STARTED = "[dim]stopped; nothing that it started is left running, workers that served before live on[/]"


@dataclass(frozen=True, slots=True)
class FirstPrompt:
    """A prompt that is answered as soon as the cluster serves, with its sampling parameters."""

    text: str
    sampling: Sampling


def serve(config: ClusterSettings, model: Path | None, first: FirstPrompt | None, *, once: bool) -> None:
    """Start a cluster and serve until a signal arrives or, with `once`, until `first` is answered.

    `model` is the model's path; None = the default model. Raises a TandemError with the reason if the cluster cannot
    serve, and KeyboardInterrupt for a signal during the start. In every case all of the cluster's processes have ended
    on return, except workers that may outlive the cluster.
    """
    console = Console(highlight=False, soft_wrap=True)
    if first is not None and config.router.tls is not None and config.router.tls.client_ca is not None:
        raise InvalidArgument("--prompt", "cannot be combined with --tls-client-ca; use `tandem generate`")
    with _one_interrupt():
        check_listeners(config)
        check_network(config)
        check_memory(config)
        check_tiers(config)
        warn_if_open(config)
        try:
            with StartView(console) as view, _compiling_ahead(config):
                config = replace(_with_model(config, model, view), log_folder=new_log_folder())
                cluster = _start(console, config, view)
        except KeyboardInterrupt:
            console.print(NOT_STARTED if config.worker.outlive_s else STOPPED)
            raise
        leave_workers = False
        try:
            leave_workers = _serve(console, cluster, config, first, once)
        except KeyboardInterrupt as interrupt:
            leave_workers = _leaves_workers(interrupt)
            raise
        finally:
            # A further signal must not interrupt the cleanup, which would leave processes behind.
            _ignore_signals()
            console.print("[dim]stopping …[/]")
            cluster.stop(leave_workers=leave_workers)
            console.print(_left(config) if cluster.left_workers else STOPPED)


def _compiling_ahead(config: ClusterSettings) -> AbstractContextManager[None]:
    """Compile the kernels of workers on this host's CPU while the model is prepared and Ray starts."""
    if not config.engine.on_cpu or config.ray_address:
        return nullcontext()
    return compiling_ahead("float32" if config.engine.dtype == AUTO else config.engine.dtype)


def _start(console: Console, config: ClusterSettings, view: StartView) -> Cluster:
    """Start the cluster and return it; on failure, print the folder of the logs and raise the reason."""
    try:
        return Cluster.start(config, view.cluster_progress)
    except TandemError:
        console.print(f"the logs of this start are in {config.log_folder}", markup=False)
        raise


def _serve(console: Console, cluster: Cluster, config: ClusterSettings, first: FirstPrompt | None, once: bool) -> bool:
    """Answer the first prompt and serve until a signal arrives; return True if workers may outlive the cluster.

    With `once`, return False after the first prompt.
    """
    ends = cluster.endpoints
    announced = state.announce(
        ends.grpc,
        ends.http,
        config.served.name,
        ends.controller,
        ends.token,
        metrics=ends.metrics,
        operations=ends.operations,
        certificate="" if config.router.tls is None else str(config.router.tls.certificate),
        stop_grace_s=config.stop_grace_s,
        logs=str(config.log_folder),
    )
    try:
        if first is not None:
            _answer(console, config, ends, first)
        console.print(_endpoints(config, ends), markup=False)
        return False if once else _serve_until_interrupted(console, cluster)
    finally:
        announced.unlink(missing_ok=True)


def _serve_until_interrupted(console: Console, cluster: Cluster) -> bool:
    try:
        console.print("Ctrl-C stops it.")  # Ctrl-C may arrive before the print returns
        cluster.wait()
    except KeyboardInterrupt as interrupt:
        return _leaves_workers(interrupt)
    return False


def _answer(console: Console, config: ClusterSettings, ends: Endpoints, first: FirstPrompt) -> None:
    """Stream the answer to the first prompt, and print its timeline."""
    console.print(f"\n{first.text}\n", style="bold", markup=False)
    key_file = "" if config.router.api_key_file is None else str(config.router.api_key_file)
    key = first_key("--api-key-file", next(iter(config.router.api_keys), ""), key_file)
    tls = None if config.router.tls is None else tls_of("", "", "", pinned=str(config.router.tls.certificate))
    with router_client(ends.grpc, key, tls) as client:
        answer = answer_one(client, first.text, first.sampling)
    console.print()
    console.print(timeline_table(answer))


def _endpoints(config: ClusterSettings, ends: Endpoints) -> str:
    scheme = "http" if config.router.tls is None else "https"
    http = f"{scheme}://{ends.http.removeprefix('http://')}"
    return (
        f"\n{config.served.name} is served at\n"
        f"  browser {http}/\n"
        f'  gRPC    {ends.grpc}  (tandem.v1.Inference; try: tandem generate "Hello")\n'
        f"  OpenAI  {http}/v1\n"
        f"  metrics http://{ends.metrics}/metrics  (try: tandem top)\n"
        f"  logs    {config.log_folder}"
    )


def _with_model(config: ClusterSettings, model: Path | None, view: StartView) -> ClusterSettings:
    """Download or convert the model if necessary, check it, and return the settings with its folder and name."""
    hub = None if model is None else hub_model(model)
    if hub is not None:
        with view.step(f"fetching {hub.name}") as progress:
            path = hub.download(progress if view.on_terminal else each_part(progress))
    else:
        path = model or find_default_model()
    name = hub.name if hub else NAME if model is None else model_name(path) if path.is_file() else path.resolve().name
    with view.step(f"checking {name}") as progress:
        from tandem.engine.weights.gguf import prepare_model

        folder = path if config.engine.random_weights else prepare_model(path, progress=progress, codes=True)
        check_device(config)
        config = config.with_fields(model=folder, served_model_names=config.served.served_model_names or (name,))
        check_draft(config)
        check_page(config)
        check_loras(config)
        check_weights(config)
        warn_of_slow_pages(config)
        tokenizer = config.served.tokenizer_folder
        chosen = config.router.chat_template or (TEMPLATE if model is None and config.served.tokenizer is None else "")
        template = read_template(chosen, tokenizer) if chosen else ""
        if path.is_dir() or config.served.tokenizer or template:
            Tokenizer(tokenizer, template)  # raises if the tokenizer is missing; a converted GGUF file always has one
    return config.with_fields(chat_template=template)


@contextmanager
def _one_interrupt() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into a KeyboardInterrupt, and ignore later ones to protect the cleanup.

    The handlers are set even if the parent ignored SIGINT, as shells do for background jobs.
    """
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, _interrupt) for number in watched}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: object) -> NoReturn:
    _ignore_signals()
    raise KeyboardInterrupt(number)


def _leaves_workers(interrupt: KeyboardInterrupt) -> bool:
    """Return True if the interrupt was SIGTERM or SIGHUP, after which workers may outlive this process.

    Ctrl-C and `tandem down` send SIGINT, which stops the workers as well.
    """
    return interrupt.args in {(signal.SIGTERM,), (signal.SIGHUP,)}


def _left(config: ClusterSettings) -> str:
    return (
        f"[dim]stopped; workers live on. Where no other `tandem up` serves with them, they wait "
        f"{config.worker.outlive_s:g} s for one with --cluster-name {escape(config.cluster_name)} and its --token, and"
        f" end then; `tandem down --address {escape(config.ray_address)} --cluster-name {escape(config.cluster_name)}`"
        " ends them now[/]"
    )


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
