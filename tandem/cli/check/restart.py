"""The check of a restart: requests run while a command of the user restarts a part of the server."""

from __future__ import annotations

import asyncio
import time

from tandem.cli.check.answer import Answer
from tandem.cli.check.request import CheckRequest
from tandem.cli.check.run import Allowed, CheckRun
from tandem.protocol.errors import InvalidArgument

_RETRY_S = 0.2


async def restart(run: CheckRun, command: str) -> None:
    """Requests run while the command restarts a part of the server.

    A request may fail with an error, but no answer may be wrong or end early as if it were complete, none may hang, and
    within `recovery_s` after the command each client must get a right answer again. Raises InvalidArgument if the
    command fails.
    """
    requests = [run.request() for _ in range(run.settings.concurrency)]
    for request in requests:
        await run.reference(request)
    load = RestartLoad(run)
    clients = [asyncio.ensure_future(load.client(number, requests)) for number in range(len(requests))]
    try:
        await load.all_answered()
        process = await asyncio.create_subprocess_shell(command)
        status = await process.wait()
        load.restarted_s = time.monotonic()
        if status:
            raise InvalidArgument("--restart-command", f"{command!r} ended with exit code {status}")
        await asyncio.gather(*clients)
    finally:
        for client in clients:
            client.cancel()
    if load.recovered_s:
        run.notes.append(f"all clients have right answers {max(load.recovered_s):.1f} s after the command")


class RestartLoad:
    """Clients that send one request after the other until each has a right answer from after the restart."""

    def __init__(self, run: CheckRun) -> None:
        self._run = run
        self.restarted_s: float | None = None
        """The time of `time.monotonic` at which the command had ended."""
        self.recovered_s: list[float] = []
        """For each client, the seconds from then to its first right answer to a request sent later."""
        self._waiting = run.settings.concurrency
        self._answered = asyncio.Event()

    async def all_answered(self) -> None:
        """Wait until each client has had one answer, so that all of them have a request running."""
        await self._answered.wait()

    async def client(self, number: int, requests: list[CheckRequest]) -> None:
        """Send requests until one that was sent after the restart is answered right, or `recovery_s` have passed."""
        turn = number
        while True:
            request = requests[turn % len(requests)]
            sent_s = time.monotonic()
            answer: Answer = await self._run.server.send(request)
            right = await self._run.judge(request, answer, Allowed.CUT)
            self._waiting -= turn == number
            if not self._waiting:
                self._answered.set()
            turn += 1
            restarted_s = self.restarted_s
            if restarted_s is not None and sent_s >= restarted_s:
                if right:
                    self.recovered_s.append(time.monotonic() - restarted_s)
                    return
                if time.monotonic() - restarted_s > self._run.settings.recovery_s:
                    self._run.fail(f"no right answer within {self._run.settings.recovery_s:g} s", request)
                    return
            if answer.error:
                await asyncio.sleep(_RETRY_S)
