"""Heartbeats to a worker: they detect a stopped process and an event loop that hangs.

A worker's event loop answers heartbeats while its engine computes, so a long step does not count as silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tandem.net.heartbeat import Heartbeat
from tandem.protocol.errors import TandemError

log = logging.getLogger(__name__)

BEATS = 4
"""Number of heartbeats sent within `silence_s`, so that one late reply does not make a worker count as silent."""


class LivenessProbe:
    """Sends heartbeats to one worker while `needed` returns True, to detect that it does not respond.

    Any message from the worker counts as a reply. The `WorkerLink` owns it; all calls are on the event loop.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        silence_s: float,
        *,
        needed: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        """Create the probe; `run` sends the heartbeats.

        `ask` sends a heartbeat and returns when the reply arrives. After `silence_s` seconds without a reply the worker
        counts as silent; 0 = never. `on_change` is called when the worker becomes silent and when it responds again.
        """
        self._call = ask
        self._silence_s = silence_s
        self._needed = needed
        self._on_change = on_change
        self._heartbeat = Heartbeat(self._ask, silence_s / BEATS, lambda _: BEATS)
        self._asking: asyncio.Task[None] | None = None
        self.silent = False
        """True if the worker has not responded for `silence_s`, until it responds again."""

    def observe(self) -> None:
        """Record that a message has arrived from the worker."""
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
        """Send a heartbeat, unless an earlier one is in flight, whose reply shows as well that the worker responds."""
        if not self._needed():
            self._heartbeat.beat()
        elif self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        try:
            await self._call()
        except TandemError:
            return  # the event stream detects a dead worker
        self._heartbeat.beat()
