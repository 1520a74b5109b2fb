"""Sends the loads of `tandem bench` one after another, with a progress bar.

This is a separate module so that `tandem --help` does not import the dependencies of a load.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tandem.cli.bench.figures import Load
from tandem.cli.bench.servers import Server
from tandem.cli.load.client import Progress as Reached
from tandem.cli.load.run import LoadInterrupted, LoadSettings, report_of
from tandem.cli.load.slo import SloCell
from tandem.cli.load.workload import Workload


def measure(
    server: Server,
    workloads: Sequence[Workload],
    cells: Sequence[SloCell],
    settings: LoadSettings,
    console: Console,
) -> list[Load]:
    """Send each workload, and return the result of each.

    Ctrl-C ends the current load and skips the later ones; the result contains the requests that had ended by then.
    """
    loads: list[Load] = []
    for workload in map(server.fitted, workloads):
        with _shown(workload, console) as (progress, task):

            def on_progress(reached: Reached, progress: Progress = progress, task: TaskID = task) -> None:
                progress.update(task, completed=reached.ended, sent=reached.sent, failed=reached.failed)

            try:
                results = server.send(workload, settings, on_progress)
            except LoadInterrupted as interrupted:
                if any(result.records for result in interrupted.results):
                    cut = replace(workload, seconds=min(interrupted.seconds, workload.seconds))
                    loads.append(Load(report_of(cut, interrupted.results, cells, settings), interrupted=True))
                return loads
        loads.append(Load(report_of(workload, results, cells, settings)))
    return loads


@contextmanager
def _shown(workload: Workload, console: Console) -> Iterator[tuple[Progress, TaskID]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(
            "{task.completed:.0f} of {task.total:.0f} ended, {task.fields[sent]} sent, {task.fields[failed]} failed"
        ),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        name = f"{workload.rate:g} requests/s"
        yield progress, progress.add_task(name, total=len(workload.arrivals), sent=0, failed=0)
