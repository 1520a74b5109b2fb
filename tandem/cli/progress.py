"""Progress bars for commands with long computations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Report = Callable[[str, float], None]
"""Function that is called with the name of an activity and its completed fraction, 0 to 1."""

_PARTS = 20


def each_part(report: Report) -> Report:
    """Return a function that passes on the reports of one activity at which a further 1/20 of it is complete.

    It is for logs, in which each report is a line.
    """
    passed = -1

    def pass_on(what: str, done: float) -> None:
        nonlocal passed
        part = int(done * _PARTS)
        if part > passed:
            passed = part
            report(what, done)

    return pass_on


@contextmanager
def progress_bars(console: Console) -> Iterator[Report]:
    """Show one progress bar per activity if the output is a terminal; yield the function that updates the bars."""
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: float) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=1.0)
            progress.update(tasks[what], completed=done)

        yield report
