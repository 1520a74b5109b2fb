"""Runs a workload against a cluster: several client processes, a common start, one report."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

from benchmarks.load.client import Share, ShareResult, run_share
from benchmarks.load.report import LoadReport, make_report
from benchmarks.load.slo import SloCell
from benchmarks.load.target import Target, find_target, wait_until_idle
from benchmarks.load.workload import Arrival, Workload
from wire.errors import Internal, InvalidArgument

_HEAD_START_S = 0.2
"""Seconds between the message with the start time and the start, so that all clients receive it before."""
_END_S = 5.0
_T = TypeVar("_T")
_Share = TypeVar("_Share")


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Settings of the clients, independent of the workload."""

    clients: int = 4
    """Number of client processes."""
    drain_s: float = 60.0
    """Seconds for answers after the last due time; requests that have not ended by then have failed."""
    lateness_bound_s: float = 0.010
    """A run is invalid if more than one request in a hundred is sent later than this after it was due, in seconds."""

    slo_class: str = ""
    """The service class of every request; empty: none."""

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise InvalidArgument("--clients", f"{self.clients} is less than 1")


def run_load(
    target: Target | str,
    workload: Workload,
    cells: Sequence[SloCell],
    settings: LoadSettings | None = None,
    *,
    on_start: Callable[[float], None] | None = None,
) -> LoadReport:
    """Sends every request of `workload` when it is due, cut to the model's context, and returns the report.

    `target` may be an address (host:port); `on_start` receives the start, by `time.monotonic`. Unavailable if the
    cluster does not respond or has other requests, Internal if a client process dies.
    """
    settings = settings or LoadSettings()
    target = find_target(target) if isinstance(target, str) else target
    workload = workload.fitted(target.context)
    wait_until_idle(target, settings.drain_s)
    results = run_clients(run_share, _shares(target, workload, settings), on_start)
    records = [record for result in results for record in result.records]
    busiest = max(result.cpu_share for result in results)
    return make_report(workload, records, cells, settings.lateness_bound_s, busiest)


def run_clients(
    work: Callable[[Connection, _Share], None],
    shares: Sequence[_Share],
    on_start: Callable[[float], None] | None = None,
) -> list[ShareResult]:
    """Runs `work` in a process per share: it sends "ready", takes the common start and sends its `ShareResult`."""
    with _clients(work, shares) as pipes:
        for pipe in pipes:
            _receive(pipe, str)
        start = time.monotonic() + _HEAD_START_S
        if on_start is not None:
            on_start(start)
        for pipe in pipes:
            pipe.send(start)
        return [_receive(pipe, ShareResult) for pipe in pipes]


def _shares(target: Target, workload: Workload, settings: LoadSettings) -> list[Share]:
    give_up_s = workload.seconds + settings.drain_s
    return [
        Share(target.address, target.api_key, workload.seed, target.vocab_size, each, give_up_s, settings.slo_class)
        for each in deal(workload, settings.clients)
    ]


def deal(workload: Workload, clients: int) -> list[tuple[tuple[int, Arrival], ...]]:
    """Deals numbered arrivals to the clients in turn, so that a burst is spread over all of them."""
    numbered = tuple(enumerate(workload.arrivals))
    return [numbered[first::clients] for first in range(min(clients, len(numbered)))]


@contextmanager
def _clients(work: Callable[[Connection, _Share], None], shares: Sequence[_Share]) -> Iterator[list[Connection]]:
    """Starts a process for each share, and yields the pipes; kills the processes at the end."""
    context = get_context("spawn")
    pipes, processes = [], []
    try:
        for share in shares:
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, share), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            pipes.append(ours)
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


def _receive(pipe: Connection, kind: type[_T]) -> _T:
    try:
        received = pipe.recv()
    except EOFError:
        raise Internal("a client process of the load died; its output is above") from None
    if not isinstance(received, kind):
        raise Internal(f"a client process of the load sent {type(received).__name__}, not {kind.__name__}")
    return received
