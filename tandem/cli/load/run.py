"""Runs a workload against a cluster: several client processes with a common start, and one report."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from threading import current_thread, main_thread
from typing import TypeVar

from tandem.cli.load.client import GrpcShare, Progress, Share, ShareResult, run_share
from tandem.cli.load.report import LoadReport, make_report
from tandem.cli.load.slo import SloCell
from tandem.cli.load.target import Target, find_target, wait_until_idle
from tandem.cli.load.workload import Arrival, Workload
from tandem.protocol.errors import Internal, InvalidArgument

_HEAD_START_S = 0.2
"""Seconds between the message with the start time and the start itself, so that all clients receive it in time."""
_END_S = 5.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Settings of the client processes that do not depend on the workload."""

    clients: int = 4
    """Number of client processes."""
    drain_s: float = 60.0
    """Seconds to wait for answers after the last due time. Requests that have not ended by then count as failed."""
    lateness_bound_s: float = 0.010
    """Maximum delay after the due time, in seconds: a run is invalid if more than 1 % of its requests are later."""

    slo_class: str = ""
    """The SLO class of every request; empty = none."""

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise InvalidArgument("--clients", f"{self.clients} is less than 1")


class LoadInterrupted(KeyboardInterrupt):
    """Raised if Ctrl-C interrupts a load, `seconds` after its start; `results` are the clients' results up to then."""

    def __init__(self, results: Sequence[ShareResult], seconds: float) -> None:
        super().__init__()
        self.results = tuple(results)
        self.seconds = seconds


def run_load(
    target: Target | str,
    workload: Workload,
    cells: Sequence[SloCell],
    settings: LoadSettings | None = None,
    *,
    on_start: Callable[[float], None] | None = None,
) -> LoadReport:
    """Cut `workload` to the model's context, send each request at its due time, and return the report.

    `target` may be an address (host:port). `on_start` receives the start time of `time.monotonic`. Raises Unavailable
    if the cluster does not respond or still has other requests, and Internal if a client process dies.
    """
    settings = settings or LoadSettings()
    target = find_target(target) if isinstance(target, str) else target
    workload = workload.fitted(target.context)
    wait_until_idle(target, settings.drain_s)
    results = run_clients(shares_of(target, workload, settings), on_start)
    return report_of(workload, results, cells, settings)


def report_of(
    workload: Workload, results: Sequence[ShareResult], cells: Sequence[SloCell], settings: LoadSettings
) -> LoadReport:
    """Combine the results of all clients into one report."""
    records = [record for result in results for record in result.records]
    busiest = max(result.cpu_share for result in results)
    return make_report(workload, records, cells, settings.lateness_bound_s, busiest)


def run_clients(
    shares: Sequence[Share],
    on_start: Callable[[float], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> list[ShareResult]:
    """Run one client process per share, with a common start, and return their results.

    `on_progress` receives the combined progress of all shares. The first Ctrl-C stops the clients and raises
    `LoadInterrupted` with the results up to then; a second Ctrl-C ends the load without results.
    """
    with _clients(shares) as pipes:
        for pipe in pipes:
            _receive(pipe, str)
        start = time.monotonic() + _HEAD_START_S
        if on_start is not None:
            on_start(start)
        for pipe in pipes:
            pipe.send(start)
        with _stopped_by_interrupt(pipes) as interrupted:
            results = _collect(pipes, on_progress)
        if interrupted:
            raise LoadInterrupted(results, interrupted[0] - start)
        return results


def _collect(pipes: Sequence[Connection], on_progress: Callable[[Progress], None] | None) -> list[ShareResult]:
    """Receive from the pipes until each has delivered its result."""
    results: dict[Connection, ShareResult] = {}
    reached: dict[Connection, Progress] = {}
    while left := [pipe for pipe in pipes if pipe not in results]:
        for pipe in wait(left):
            assert isinstance(pipe, Connection)
            received = _receive(pipe, ShareResult, Progress)
            if isinstance(received, ShareResult):
                results[pipe] = received
            elif isinstance(received, Progress):
                reached[pipe] = received
        if on_progress is not None and reached:
            on_progress(Progress(*map(sum, zip(*map(astuple, reached.values()), strict=True))))
    return list(results.values())


@contextmanager
def _stopped_by_interrupt(pipes: Sequence[Connection]) -> Iterator[list[float]]:
    """Let the first Ctrl-C stop the clients instead of this process while the body runs.

    Yields a list that is empty until then, and afterwards contains the time of the Ctrl-C (`time.monotonic`).
    """
    interrupted: list[float] = []

    def stop(*_: object) -> None:
        # From now on Ctrl-C has its usual effect, so that a second one ends the load at once.
        signal.signal(signal.SIGINT, before)
        interrupted.append(time.monotonic())
        for pipe in pipes:
            with suppress(OSError):  # that client has ended
                pipe.send("stop")

    if current_thread() is not main_thread():  # Python delivers signals to the main thread only.
        yield interrupted
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def shares_of(target: Target, workload: Workload, settings: LoadSettings) -> list[GrpcShare]:
    """Split the workload into one share per client."""
    deadline_s = workload.seconds + settings.drain_s
    return [
        GrpcShare(
            target.address,
            target.api_key,
            workload.seed,
            target.vocab_size,
            arrivals,
            deadline_s,
            settings.slo_class,
            target.tls,
        )
        for arrivals in deal(workload, settings.clients)
    ]


def deal(workload: Workload, clients: int) -> list[tuple[tuple[int, Arrival], ...]]:
    """Distribute the arrivals, each with its number, to the clients in turn, so that all clients share a burst."""
    numbered = tuple(enumerate(workload.arrivals))
    return [numbered[first::clients] for first in range(min(clients, len(numbered)))]


@contextmanager
def _clients(shares: Sequence[Share]) -> Iterator[list[Connection]]:
    """Start one process per share, and yield the pipes to them. On exit the processes are killed."""
    context = get_context("spawn")
    pipes, processes = [], []
    try:
        for share in shares:
            parent_end, child_end = context.Pipe()
            process = context.Process(target=run_share, args=(child_end, share), daemon=True)
            process.start()
            child_end.close()  # so that the pipe ends when the client process ends
            pipes.append(parent_end)
            processes.append(process)
        yield pipes
        for process in processes:
            process.join(_END_S)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.kill()
            process.join()


def _receive(pipe: Connection, *kinds: type[_T]) -> _T:
    try:
        received = pipe.recv()
    except EOFError:
        raise Internal("a client process of the load died; its output is above") from None
    if not isinstance(received, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise Internal(f"a client process of the load sent {type(received).__name__}, not {wanted}")
    return received
