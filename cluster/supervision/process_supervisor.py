"""Keeps one process of the cluster alive: start, watch, start again.

1. a new incarnation, never used before
2. spawned; its death is awaited from the first moment
3. started: it serves
4. dead: whoever listens hears of it at once, then a bounded wait, then 1. One that lives but shows no sign of life for
   too long is killed, and so dead.

One that is retired ends by itself or is ended, and 1. comes when it is asked for. One that is let go lives on without
its keeper, and another keeper may adopt it: that one's first life begins with 2.
"""

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from cluster.liveness import HANG_DEADLINE_S, until_it_hangs
from cluster.supervision.health import Backoff, Health, Phase
from cluster.supervision.incarnations import Incarnations
from wire.errors import DeadlineExceeded, FailedPrecondition

log = logging.getLogger(__name__)

PROGRESS_S = 0.2
"""How often a start is asked how far it is, in seconds."""
LOOK_S = 0.05
END_S = 5.0
"""What a process that is to stop may take, beside what it lets others finish, before it is killed."""
WAITS_FOR_PLACE = "waiting for a node that has a place for it"


class Process(ABC):
    """A spawned process. Its keeper ends it."""

    async def placed(self) -> None:
        """Wait until there is a node for it, however long that takes."""
        return

    @abstractmethod
    async def pid(self) -> int:
        """Its process id on its host."""

    @abstractmethod
    async def start(self) -> None:
        """Load and serve; returns when it serves. Raises what went wrong."""

    async def progress(self) -> tuple[str, float]:
        """What `start` is busy with, in words, and the fraction of it that is done."""
        return "", 0.0

    @abstractmethod
    async def ended(self) -> str:
        """Wait until the process is gone, for whatever reason; the reason in a sentence."""

    @abstractmethod
    async def works(self) -> None:
        """Returns as soon as whatever does its work, all of its event loops, has taken the question; never, while one
        of them hangs. What it raises is a sign of life, too: a death shows by `ended`.
        """

    @abstractmethod
    async def kill(self) -> None:
        """End it at once, also one that is stopped or hangs. Never raises."""

    @abstractmethod
    async def end(self, grace_s: float) -> None:
        """Ask it to stop, and kill it after `grace_s` seconds. Never raises."""


class ProcessSupervisor:
    """Keeps the process called `name` alive.

    `spawn` makes the process of an incarnation; `on_death` is called with each incarnation that is over.
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
        """`hang_deadline_s`: after so many seconds without a sign of life a process is killed; 0 = never.
        `incarnations` numbers the processes; None = their order matters to nobody else.
        """
        self.name = name
        self._incarnations = incarnations or Incarnations()
        self._hang_deadline_s = hang_deadline_s
        self._spawn = spawn
        self._on_death = on_death
        self._backoff = backoff or Backoff()
        self._stopping = asyncio.Event()
        self._ending = asyncio.Event()
        """Set when the process that runs has to end."""
        self._adopted: tuple[int, Process] | None = None
        self._lived_before = False
        """Whether the process that runs was adopted."""
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
        """How it is doing now."""
        return Health(
            self.name, self._phase, self._incarnation, self._pid, self._restarts, self._error, *self._progress
        )

    def stop(self) -> None:
        """Let the process end and start no other; `run` returns then."""
        self._stopping.set()
        self._ending.set()
        self._wanted.set()

    def adopt(self, incarnation: int, process: Process) -> None:
        """Before `run`: keep a process that lives already; its `start` is what it takes to be kept."""
        self._adopted = incarnation, process

    def let_go(self) -> None:
        """Keep it no longer: a process that serves, here or where it was adopted from, lives on; one that never did is
        ended. `run` returns then.
        """
        self._lives_on = self._phase is Phase.SERVING or (self._phase is Phase.STARTING and self._lived_before)
        self.stop()

    @property
    def phase(self) -> Phase:
        """Where the process stands."""
        return self._phase

    async def until(self, phase: Phase, within_s: float = math.inf) -> None:
        """DeadlineExceeded if it is not there after so many seconds, FailedPrecondition if it never will be."""
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
        """Whether it has a process or is to have one; else it has been retired."""
        return self._wanted.is_set()

    def retire(self) -> None:
        """The process is going to end by itself; start no other until `restart`."""
        self._wanted.clear()
        if self._phase is Phase.SERVING:
            self._phase = Phase.DRAINING

    def end_now(self) -> None:
        """End a retired process that does not end by itself."""
        self._ending.set()

    def restart(self) -> None:
        """A retired one is wanted again: at once if it has ended, else when it has."""
        self._wanted.set()

    async def run(self, grace_s: float = END_S) -> None:
        """Keep the process alive until `stop`; then it has `grace_s` seconds to end by itself."""
        while not self._stopping.is_set():
            if not self._wanted.is_set():
                self._phase = Phase.DRAINED
                await self._wanted.wait()
                continue
            born = time.monotonic()
            try:
                await self._live(grace_s)
            except Exception as error:
                log.exception("%s could not be kept as it should be", self.name)
                self._error = first_line(error)
            if self._stopping.is_set():
                break
            if not self._wanted.is_set():
                continue
            self._restarts += 1
            wait_s = self._backoff.after_death(time.monotonic() - born)
            log.warning("%s is gone (%s), next try in %.1f s", self.name, self._error, wait_s)
            self._phase = Phase.WAITING
            await self._pause(wait_s)
        self._phase = Phase.STOPPED

    async def _live(self, grace_s: float) -> None:
        """One incarnation from birth to death."""
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
        """Returns when the process is gone, did not start, or is no longer wanted; whether it is gone."""
        ended = asyncio.ensure_future(process.ended())
        started = asyncio.ensure_future(self._start(process))
        stopping = asyncio.ensure_future(self._ending.wait())
        hanging = asyncio.ensure_future(self._hangs(process))
        tasks = {ended, started, stopping, hanging}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
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
        """Wait until the process lives without working; for how long it was silent then, in seconds."""
        return await until_it_hangs(
            process.works,
            self._hang_deadline_s,
            starts=lambda: self._phase is Phase.STARTING,
            is_there=lambda: bool(self._pid),
        )

    async def _start(self, process: Process) -> None:
        self._progress = (WAITS_FOR_PLACE, 0.0)
        await process.placed()
        self._progress = ("", 0.0)
        self._pid = await process.pid()
        following = asyncio.ensure_future(self._follow(process))
        try:
            await process.start()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)  # a process that is gone says so by its end
        self._phase = Phase.SERVING

    async def _follow(self, process: Process) -> None:
        """Learn how far the start is, until cancelled."""
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
    """The first line of an error, or its type where it has no words."""
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
