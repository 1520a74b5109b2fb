"""Virtual time: a clock that runs scheduled calls in order, and an event loop on it that also runs coroutines."""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any

_CALLS_MAX = 100_000
"""Maximum number of callbacks at the same virtual time; more indicate an endless loop."""


class VirtualClock:
    """A clock in seconds that jumps from one scheduled call to the next.

    Calls for the same time run in the order in which they were scheduled.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def __call__(self) -> float:
        """Return the current virtual time in seconds."""
        return self.now

    def at(self, moment: float, call: Callable[[], None]) -> None:
        """Schedule `call` for the time `moment`: now if that has passed, never if it is infinite."""
        if moment < math.inf:
            self._planned += 1
            heapq.heappush(self._calls, (moment if moment > self.now else self.now, self._planned, call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Schedule `call` to run in `seconds` seconds."""
        self.at(self.now + seconds, call)

    def run(self, until: float = math.inf) -> None:
        """Run scheduled calls until none is left or the time is `until`."""
        calls = self._calls
        while calls and calls[0][0] <= until:
            self.now, _, call = heapq.heappop(calls)
            call()


class VirtualLoop(VirtualClock, asyncio.AbstractEventLoop):
    """The part of the asyncio event loop interface that workers and routers use, in virtual time.

    After each scheduled call, the callbacks that it has made ready are run. The loop's `run` raises uncaught errors.
    """

    def __init__(self, now: float = 0.0) -> None:
        super().__init__(now)
        self._ready: deque[asyncio.Handle] = deque()
        self._tasks: dict[asyncio.Task[Any], None] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context in which this loop is asyncio's running loop."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(before)

    def run(self, until: float = math.inf) -> None:
        """Run ready callbacks, then scheduled calls and the callbacks that these make ready, up to the time `until`."""
        with self.running():
            self._run_ready()
            calls = self._calls
            while calls and calls[0][0] <= until:
                self.now, _, call = heapq.heappop(calls)
                call()
                if self._ready:
                    self._run_ready()

    def run_ready(self) -> None:
        """Run all ready callbacks without advancing the time; does nothing when called from inside the loop."""
        if asyncio._get_running_loop() is not self:
            with self.running():
                self._run_ready()

    def advance(self, seconds: float) -> None:
        """Advance the time by `seconds`, and run each scheduled call at its time."""
        end = self.now + seconds
        self.run(end)
        self.now = end

    def _run_ready(self) -> None:
        for _ in range(_CALLS_MAX):
            if not self._ready:
                return
            self._run_handle(self._ready.popleft())
        raise AssertionError("the coroutines never come to rest")

    def _run_handle(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            handle._run()

    def time(self) -> float:
        """Return the current virtual time in seconds."""
        return self.now

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio.AbstractEventLoop`."""
        handle = asyncio.Handle(callback, args, self, copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio.AbstractEventLoop`."""
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio.AbstractEventLoop`."""
        handle = asyncio.TimerHandle(when, callback, args, self, copy_context() if context is None else context)
        self.at(when, lambda: self._ready.append(handle))
        return handle

    def create_future(self) -> "asyncio.Future[Any]":
        """See `asyncio.AbstractEventLoop`."""
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> Any:
        """See `asyncio.AbstractEventLoop`; the loop keeps the task until it is done."""
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop, context=Context())
        return task

    def run_in_executor(self, _executor: Any, func: Any, *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        """Call `func` immediately on the caller's thread; return a completed future."""
        done: Future[Any] = Future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return asyncio.wrap_future(done, loop=self)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Raise the uncaught error."""
        if (error := context.get("exception")) is not None:
            raise error

    def get_debug(self) -> bool:
        """Return False."""
        return False

    def is_running(self) -> bool:
        """Return True."""
        return True

    def is_closed(self) -> bool:
        """Return False."""
        return False

    def _timer_handle_cancelled(self, _handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer stays scheduled until its time and has no effect then."""
