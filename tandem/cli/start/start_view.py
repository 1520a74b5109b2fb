"""The start-up on the terminal: one line per step, with a tick and its duration when it is done."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from tandem.cluster.launcher import Progress as ClusterProgress


class StartView:
    """Start-up lines on `console`, live on a terminal, plain elsewhere. Use as a context; any thread may report."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._began: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._done: set[str] = set()
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

    @contextmanager
    def step(self, what: str) -> Iterator[Callable[[str, float], None]]:
        """Shows a step of this thread; yields a function that takes a description and the fraction done, 0 to 1."""
        self.report(what)
        yield lambda detail, fraction: self.report(what, detail=detail, fraction=fraction)
        self.report(what, done=True)

    def cluster_progress(self, event: ClusterProgress) -> None:
        """Shows the repeated reports of `Cluster.start`, and afterwards processes that die and serve again."""
        if event.note:
            self._console.print(f"[yellow]{escape(event.note)}[/]")
            return
        if self._closed:
            again = "serves again" if event.done else f"is gone ({event.detail}); restarting it"
            self._console.print(f"[yellow]{event.name} {again}[/]")
            return
        self.report(f"starting {event.name}", done=event.done, detail=event.detail, fraction=event.fraction)

    def report(self, what: str, *, done: bool = False, detail: str = "", fraction: float = 0.0) -> None:
        """Updates the step `what`."""
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

    def _say(self, line: str) -> None:
        """Prints a line as it happens where no line can be redrawn."""
        if not self._console.is_terminal:
            self._console.print(line)
            sys.stdout.flush()
