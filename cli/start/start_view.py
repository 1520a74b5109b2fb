"""Start-up as people see it: one line a step, with a tick and its time when it is done."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from cluster.launcher import Progress as ClusterProgress


class StartView:
    """Lines of start-up on `console`, live on a terminal, plain elsewhere. Use as a context; any thread may report."""

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
        """A step in this thread; what it yields takes a description and how much of it is done, 0 to 1."""
        self.report(what)
        yield lambda detail, fraction: self.report(what, detail=detail, fraction=fraction)
        self.report(what, done=True)

    def cluster_progress(self, event: ClusterProgress) -> None:
        """Reports of `Cluster.start`, which repeat themselves, and after it of what dies and comes back."""
        if event.note:
            self._console.print(f"[yellow]{escape(event.note)}[/]")
            return
        if self._closed:
            again = "serves again" if event.done else f"is gone ({event.detail}); starting it again"
            self._console.print(f"[yellow]{event.name} {again}[/]")
            return
        self.report(f"starting {event.name}", done=event.done, detail=event.detail, fraction=event.fraction)

    def report(self, what: str, *, done: bool = False, detail: str = "", fraction: float = 0.0) -> None:
        """How the step `what` is doing."""
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
        """Where no line can be redrawn, each is printed as it happens."""
        if not self._console.is_terminal:
            self._console.print(line)
            sys.stdout.flush()
