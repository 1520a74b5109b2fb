"""Records the role changes in a real cluster."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from tandem.capacity.planner.decision import Direction, Split
from tandem.cli.connection.controller_client import ControllerClient
from tandem.cluster.launcher import Endpoints
from tandem.protocol.messages import Role

_LOOK_S = 0.5


class Watch(AbstractContextManager["Watch"]):
    """Asks the controller twice a second; `changes` has the changes, `at_s` in seconds after `start`."""

    def __init__(self, listeners: Endpoints, say: Callable[[str], None]) -> None:
        self.changes: list[dict[str, Any]] = []
        self._controller = ControllerClient(listeners.controller, listeners.token)
        self._say = say
        self._over = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def start(self, moment: float) -> None:
        """Sets the time of `time.monotonic` from which changes count; the default is the watch's own start."""
        self._began = moment

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        before: Split | None = None
        while not self._over.wait(_LOOK_S):
            now = asyncio.run(self._split())
            if before is not None and now.prefill != before.prefill:
                self._note(now, now.prefill - before.prefill)
            before = now

    async def _split(self) -> Split:
        roles = Counter(info.assigned_role for info in await self._controller.workers())
        return Split(roles[Role.PREFILL], roles[Role.DECODE])

    def _note(self, now: Split, more: int) -> None:
        at_s, direction = time.monotonic() - self._began, Direction.TO_PREFILL if more > 0 else Direction.TO_DECODE
        change = {"at_s": round(at_s, 1), "split": now.text, "flips": abs(more), "direction": direction.value}
        self._say(f"{at_s:8.1f} s of the day: {now.text}")
        self.changes.append(change)
