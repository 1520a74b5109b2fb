"""An event loop with a clock of its own, and processes that can be killed in it.

Nothing runs by itself: `run_ready` runs what can run now, `advance` lets time pass from timer to timer. Everything that
a process starts runs in its context; once it is killed none of that runs any more, not even a `finally`, as with
SIGKILL.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

_PROCESS: "ContextVar[Process | None]" = ContextVar("process", default=None)
_CALLS_MAX = 100_000
"""The maximum of callbacks at one time; more mean an endless cycle."""

T = TypeVar("T")


class Process:
    """A process: its tasks and timers stop together when it is killed."""

    def __init__(self, name: str, loop: "VirtualLoop") -> None:
        self.name = name
        self.alive = True
        self._loop = loop

    def run(self, call: Callable[..., T], *args: object) -> T:
        """Call as this process, and then run what that made ready: what it starts belongs to it."""
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


class VirtualLoop(asyncio.AbstractEventLoop):
    """The subset of an event loop that the cluster uses; `failures` holds uncaught errors."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._now = 1000.0
        self._ready: deque[tuple[Process | None, asyncio.Handle]] = deque()
        self._withheld: list[tuple[Process | None, asyncio.Handle]] = []
        self._timers: list[tuple[float, int, Process | None, asyncio.TimerHandle]] = []
        self._numbers = 0
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._futures: list[tuple[Process | None, asyncio.Future[Any]]] = []
        self._closing = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """The loop is asyncio's running loop inside."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(before)

    def run_ready(self) -> None:
        """Run everything that can run without time passing; does nothing when called from inside the loop."""
        if asyncio._get_running_loop() is self:
            return
        with self.running():
            for _ in range(_CALLS_MAX):
                if not self._ready:
                    return
                process, handle = self._ready.popleft()
                if process is not None and not process.alive and not self._closing:
                    self._withheld.append((process, handle))
                elif not handle.cancelled():
                    handle._run()
        raise AssertionError("the processes never come to rest")

    def advance(self, seconds: float) -> None:
        """Let time pass, timer by timer."""
        end = self._now + seconds
        self.run_ready()
        while self._timers and self._timers[0][0] <= end:
            when, _, process, handle = heapq.heappop(self._timers)
            self._now = max(self._now, when)
            self._ready.append((process, handle))
            self.run_ready()
        self._now = end

    def close(self) -> None:
        """Cancel every task, those of the dead too."""
        self._closing = True
        self._ready.extend(self._withheld)
        for _ in range(100):
            if not self._tasks:
                break
            for task in list(self._tasks):
                task.cancel()
            self.run_ready()

    def unheard(self) -> list[str]:
        """Failures that no living process has looked at so far; asyncio logs them when it collects the garbage."""
        alive = [future for process, future in self._futures if process is None or process.alive]
        return [repr(future) for future in alive if future._log_traceback]

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        context = copy_context() if context is None else context
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append((context.get(_PROCESS), handle))
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        context = copy_context() if context is None else context
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._numbers += 1
        heapq.heappush(self._timers, (when, self._numbers, context.get(_PROCESS), handle))
        return handle

    def create_future(self) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = asyncio.Future(loop=self)
        # Kept: what becomes of it must not depend on the garbage collector.
        self._futures.append((_PROCESS.get(), future))
        return future

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> Any:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        # A dead process's task that was collected would run its `finally` clauses.
        self._tasks[task] = None
        self._futures.append((_PROCESS.get(), task))
        task.add_done_callback(self._tasks.pop, context=Context())
        return task

    def run_in_executor(self, _executor: Any, func: Any, *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        done: Future[Any] = Future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return asyncio.wrap_future(done, loop=self)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._closing:
            self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, _handle: asyncio.TimerHandle) -> None:
        """A cancelled timer stays in the heap until it is due."""
