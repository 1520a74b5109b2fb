"""Heartbeats to a worker, which detect that its process is stopped or that its event loop hangs.

The event loop of a worker answers while its engine computes, so that a long step is no silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tandem.net.heartbeat import Heartbeat
from tandem.protocol.errors import TandemError

log = logging.getLogger(__name__)

BEATS = 4
"""Number of heartbeats within the time after which a worker counts as silent, so that one late reply is not enough."""


class LivenessProbe:
    """The heartbeats to one worker, sent while `needed`. Any message from it counts as a reply."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        silence_s: float,
        *,
        needed: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        """Create the probe; `run` sends the heartbeats.

        `ask` sends a heartbeat and returns with its reply. After `silence_s` seconds without one the worker counts as
        silent; 0 = never. `on_change` is called when it becomes silent, and when it responds again.
        """
        self._call = ask
        self._silence_s = silence_s
        self._needed = needed
        self._on_change = on_change
        self._heartbeat = Heartbeat(self._ask, silence_s / BEATS, lambda _: BEATS)
        self._asking: asyncio.Task[None] | None = None
        self.silent = False
        """True while the worker does not respond."""

    def observe(self) -> None:
        """Record a message from the worker."""
        self._heartbeat.beat()

    async def run(self) -> None:
        """Send heartbeats until cancelled."""
        try:
            while self._silence_s:
                await self._heartbeat.stops()
                self._set_silent(True)
                await self._heartbeat.resumes()
                self._set_silent(False)
        finally:
            if self._asking is not None:
                self._asking.cancel()

    def _set_silent(self, silent: bool) -> None:
        self.silent = silent
        try:
            self._on_change()
        except Exception:
            log.exception("a change of a worker's liveness was not processed completely")

    def _ask(self) -> None:
        """Send one heartbeat at a time: the reply to an old one is as good as any."""
        if not self._needed():
            self._heartbeat.beat()
        elif self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        try:
            await self._call()
        except TandemError:
            return  # a dead worker is detected by its event stream
        self._heartbeat.beat()
