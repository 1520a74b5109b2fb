"""Keeps one process of the cluster alive: starts it, watches it and restarts it.

1. The supervisor takes a new incarnation number.
2. It spawns the process, and immediately begins to wait for its death.
3. The process has started and serves.
4. The process is dead: subscribers are notified at once, and after a bounded wait the supervisor continues with step 1.
   A live process that gives no sign of life within the hang deadline is killed.

A retired process exits by itself or is ended, and step 1 follows only on request. A released process keeps running
without a supervisor, and another supervisor may adopt it, beginning with step 2.
"""

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from tandem.cluster.liveness import until_it_hangs
from tandem.cluster.supervision.health import Backoff, Health, Phase
from tandem.cluster.supervision.incarnations import Incarnations
from tandem.protocol.errors import DeadlineExceeded, FailedPrecondition
from tandem.settings.cluster import HANG_DEADLINE_S

log = logging.getLogger(__name__)

PROGRESS_S = 0.2
"""Interval between polls of a start's progress, in seconds."""
LOOK_S = 0.05
END_S = 5.0
"""Seconds that a stopping process may take, beyond the grace for its requests, before it is killed."""
WAITS_FOR_NODE = "waiting for a node with free capacity"


class Process(ABC):
    """A spawned process; its supervisor owns it and ends it."""

    async def placed(self) -> None:
        """Wait until a node for the process is available, without a time limit."""
        return

    @abstractmethod
    async def pid(self) -> int:
        """Return the process's id on its host."""

    @abstractmethod
    async def start(self) -> None:
        """Start the process; return when it serves. Raises the error of a failed start.

        An adopted process that serves already is not started again (`ProcessSupervisor.adopt`).
        """

    async def progress(self) -> tuple[str, float]:
        """Return the current activity of `start`, as text, and the fraction of it that is done."""
        return "", 0.0

    @abstractmethod
    async def ended(self) -> str:
        """Wait until the process is gone, for any reason, and return the reason as a sentence."""

    @abstractmethod
    async def works(self) -> None:
        """Return once all event loops of the process have responded; never while one of them hangs.

        An exception is a sign of life too, because `ended` reports a death.
        """

    @abstractmethod
    async def kill(self) -> None:
        """Kill the process at once, even if it is stopped or hangs. Never raises."""

    @abstractmethod
    async def end(self, grace_s: float) -> None:
        """Ask the process to stop, and kill it after `grace_s` seconds. Never raises."""


class ProcessSupervisor:
    """Keeps the process called `name` alive. Belongs to the controller's event loop.

    `spawn` starts the process of an incarnation; `on_death` is called with each incarnation that has ended.
    """

    def __init__(
        self,
        name: str,
        spawn: Callable[[int], Awaitable[Process]],
        on_death: Callable[[int], None],
        backoff: Backoff | None = None,
        *,
        hang_deadline_s: float = HANG_DEADLINE_S,
        incarnations: Incarnations | None = None,
    ) -> None:
        """Create a supervisor that kills a process after `hang_deadline_s` seconds without a sign of life; 0 = never.

        `incarnations` numbers the processes; None = a private counter.
        """
        self.name = name
        self._incarnations = incarnations or Incarnations()
        self._hang_deadline_s = hang_deadline_s
        self._spawn = spawn
        self._on_death = on_death
        self._backoff = backoff or Backoff()
        self._stopping = asyncio.Event()
        self._ending = asyncio.Event()
        """Set when the current process has to end."""
        self._adopted: tuple[int, Process] | None = None
        self._lived_before = False
        """True if the current process was adopted."""
        self._lives_on = False
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._phase = Phase.STARTING
        self._incarnation = 0
        self._pid = 0
        self._restarts = 0
        self._error = ""
        self._progress = ("", 0.0)

    def health(self) -> Health:
        """Return the current health of the process."""
        return Health(
            self.name, self._phase, self._incarnation, self._pid, self._restarts, self._error, *self._progress
        )

    def stop(self) -> None:
        """End the process without starting another one; `run` then returns."""
        self._stopping.set()
        self._ending.set()
        self._wanted.set()

    def adopt(self, incarnation: int, process: Process) -> None:
        """Supervise a process that is alive already. Must be called before `run`.

        `run` then begins with this process and this incarnation instead of spawning one, and calls `process.start`: a
        worker that serves registers with this controller, and a router that serves returns its addresses.
        """
        self._adopted = incarnation, process

    def detach(self) -> None:
        """Stop supervising the process, which may keep running; `run` then returns.

        The process keeps running if it serves, or if it was adopted and its `start` is not complete; otherwise it is
        ended.
        """
        self._lives_on = self._phase is Phase.SERVING or (self._phase is Phase.STARTING and self._lived_before)
        self.stop()

    @property
    def phase(self) -> Phase:
        """The current phase of the process."""
        return self._phase

    async def until(self, phase: Phase, within_s: float = math.inf) -> None:
        """Wait until the process is in `phase`.

        Raises DeadlineExceeded after `within_s` seconds, and FailedPrecondition if the supervisor stops before.
        """
        try:
            async with asyncio.timeout(None if within_s == math.inf else within_s):
                while self._phase is not phase:
                    if self._phase is Phase.STOPPED:
                        raise FailedPrecondition(f"{self.name} was taken out of the cluster in the meantime")
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            is_so = self.health().stage or str(self._phase)
            raise DeadlineExceeded(f"{self.name} is {is_so}, not {phase}, after {within_s:g} s") from None

    @property
    def wanted(self) -> bool:
        """True if a process runs or will be started; False between `retire` and `restart`."""
        return self._wanted.is_set()

    @property
    def will_serve(self) -> bool:
        """True if the process serves or will be started; False once it is retired or stopped."""
        return self.wanted and not self._stopping.is_set()

    def retire(self) -> None:
        """Retire the process: it ends by itself, and no other one is started until `restart`."""
        self._wanted.clear()
        if self._phase is Phase.SERVING:
            self._phase = Phase.DRAINING

    def end_now(self) -> None:
        """End a retired process that does not exit by itself."""
        self._ending.set()

    def restart(self) -> None:
        """Start a process again after `retire`: at once if the old process has ended, otherwise as soon as it has."""
        self._wanted.set()

    async def run(self, grace_s: float = END_S) -> None:
        """Keep the process alive until `stop`, after which it has `grace_s` seconds to exit."""
        while not self._stopping.is_set():
            if not self._wanted.is_set():
                self._phase = Phase.DRAINED
                await self._wanted.wait()
                continue
            born = time.monotonic()
            try:
                await self._live(grace_s)
            except Exception as error:
                log.exception("supervising %s failed", self.name)
                self._error = first_line(error)
            if self._stopping.is_set():
                break
            if not self._wanted.is_set():
                continue
            self._restarts += 1
            wait_s = self._backoff.after_death(time.monotonic() - born)
            log.warning("%s is gone (%s), restarting in %.1f s", self.name, self._error, wait_s)
            self._phase = Phase.WAITING
            await self._pause(wait_s)
        self._phase = Phase.STOPPED

    async def _live(self, grace_s: float) -> None:
        """Run one incarnation from its spawn to its death."""
        self._phase, self._pid, self._progress = Phase.STARTING, 0, ("", 0.0)
        self._ending.clear()
        try:
            process = await self._new_life()
        except Exception as error:
            self._error = first_line(error)
            return
        ended = True
        try:
            ended = await self._watch(process)
        finally:
            if ended or not self._lives_on:
                self._pid = 0
                try:
                    # The death is reported before the clean-up, which may take `grace_s` seconds.
                    self._on_death(self._incarnation)
                finally:
                    await process.end(grace_s)

    async def _new_life(self) -> Process:
        self._lived_before = self._adopted is not None
        if self._adopted is not None:
            (self._incarnation, process), self._adopted = self._adopted, None
            return process
        self._incarnation = max(self._incarnations.next(), self._incarnation + 1)
        return await self._spawn(self._incarnation)

    async def _watch(self, process: Process) -> bool:
        """Wait until the process ends, fails to start, hangs or must end; return True if it has ended or was killed."""
        ended = asyncio.ensure_future(process.ended())
        started = asyncio.ensure_future(self._start(process))
        stopping = asyncio.ensure_future(self._ending.wait())
        hanging = asyncio.ensure_future(self._hangs(process))
        tasks = {ended, started, stopping, hanging}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # The process serves: from now on only its end, a stop or a hang matters.
            if started.done() and not started.exception():
                await asyncio.wait(tasks - {started}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                self._error = ended.result()
            elif started.done() and (error := started.exception()):
                self._error = first_line(error)
            elif hanging.done():
                self._error = f"it gave no sign of life for {hanging.result():g} s and was killed"
                await process.kill()
            return ended.done() or hanging.done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hangs(self, process: Process) -> float:
        """Wait until the process hangs; return how long it has been unresponsive, in seconds."""
        return await until_it_hangs(
            process.works,
            self._hang_deadline_s,
            starts=lambda: self._phase is Phase.STARTING,
            is_there=lambda: bool(self._pid),
        )

    async def _start(self, process: Process) -> None:
        self._progress = (WAITS_FOR_NODE, 0.0)
        await process.placed()
        self._progress = ("", 0.0)
        self._pid = await process.pid()
        following = asyncio.ensure_future(self._monitor(process))
        try:
            await process.start()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)  # `ended` reports a process that is gone
        self._phase = Phase.SERVING

    async def _monitor(self, process: Process) -> None:
        """Poll the progress of a start until cancelled."""
        while True:
            self._progress = await process.progress()
            await asyncio.sleep(PROGRESS_S)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type if it has no message."""
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
