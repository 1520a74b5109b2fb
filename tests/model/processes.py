"""Processes that run in one virtual event loop and can be killed there.

Everything that a process starts runs in its context. After the process is killed, none of it runs again, not even a
`finally`, as with SIGKILL.
"""

import asyncio
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from tandem.capacity.simulation.clock import VirtualLoop

_PROCESS: "ContextVar[Process | None]" = ContextVar("process", default=None)

T = TypeVar("T")


class Process:
    """A process, whose tasks and timers all stop when it is killed."""

    def __init__(self, name: str, loop: "ProcessLoop") -> None:
        self.name = name
        self.alive = True
        self._loop = loop

    def run(self, call: Callable[..., T], *args: object) -> T:
        """Call a function as this process, then run the callbacks that it made ready.

        Everything that the function starts belongs to the process.
        """
        context = copy_context()
        context.run(_PROCESS.set, self)
        with self._loop.running():
            result = context.run(call, *args)
        self._loop.run_ready()
        return result


def this_process() -> Process:
    process = _PROCESS.get()
    assert process is not None, "only processes use the network"
    return process


class ProcessLoop(VirtualLoop):
    """A virtual event loop that runs nothing of a dead process; `failures` collects uncaught errors."""

    def __init__(self) -> None:
        super().__init__(1000.0)
        self.failures: list[str] = []
        self._withheld: list[asyncio.Handle] = []
        self._futures: list[tuple[Process | None, asyncio.Future[Any]]] = []
        self._closing = False

    def _run_handle(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(_PROCESS)
        if process is not None and not process.alive and not self._closing:
            self._withheld.append(handle)
        else:
            super()._run_handle(handle)

    def close(self) -> None:
        """Cancel every task, including those of dead processes."""
        self._closing = True
        self._ready.extend(self._withheld)
        for _ in range(100):
            if not self._tasks:
                break
            for task in list(self._tasks):
                task.cancel()
            self.run_ready()

    def unretrieved_failures(self) -> list[str]:
        """Return failures that no living process has retrieved; asyncio logs such failures on garbage collection."""
        alive = [future for process, future in self._futures if process is None or process.alive]
        return [repr(future) for future in alive if future._log_traceback]

    def create_future(self) -> "asyncio.Future[Any]":
        future = super().create_future()
        # Keep a reference: the future's fate must not depend on the garbage collector.
        self._futures.append((_PROCESS.get(), future))
        return future

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> Any:
        # If a dead process's task were garbage-collected, its `finally` clauses would run.
        task = super().create_task(coro, name=name, context=context)
        self._futures.append((_PROCESS.get(), task))
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._closing:
            self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")
