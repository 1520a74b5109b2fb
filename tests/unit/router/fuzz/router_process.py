"""A router over fake workers in its own process, so that its event loop runs only what clients ask for.

The first line on stdin is a model folder; the first line on stdout is the router's addresses. Each further line on
stdin, whatever it is, is answered with a `RouterState`. The process exits when stdin closes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from router.config import RouterConfig
from router.server import RouterServer
from tandem.net.heap import freeze_gc
from tandem.net.turns import set_switch_interval
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tandem.settings.model import ModelSettings
from tandem.settings.secrets import Secrets
from tests.unit.router.fake_cluster import FakeController, FakeWorker, until

KEYS = ("sesame", "other")
MAX_CONTEXT = 256
_TICK_S = 0.005
_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RouterState:
    """The router's requests, and its errors and delays since the last query."""

    requests: int
    """The number of running and waiting requests."""
    worker_requests: int
    """The number of requests and leases of the fake workers."""
    errors: tuple[str, ...]
    """Log records of level ERROR and above."""
    lag_s: float
    """The longest delay in seconds of a timer on the event loop."""
    turn_cpu_s: float
    """The most CPU time in seconds of the event loop's thread between two ticks of that timer.

    The time of other processes and threads does not count.
    """


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


class _Pulse:
    """A timer on the event loop that records the longest delay and the most CPU time."""

    def __init__(self) -> None:
        self.lag_s = self.cpu_s = 0.0
        self._task = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            bottleneck, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(_TICK_S)
            self.lag_s = max(self.lag_s, time.monotonic() - bottleneck - _TICK_S)
            self.cpu_s = max(self.cpu_s, time.thread_time() - cpu)

    def take(self) -> tuple[float, float]:
        """Returns both maxima since the last call."""
        worst = self.lag_s, self.cpu_s
        self.lag_s = self.cpu_s = 0.0
        return worst


async def _serve(model: Path, lines: asyncio.StreamReader) -> None:
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    controller = await FakeController("secret").start()
    workers = [
        await FakeWorker(f"{role.value}-0", role, token="secret", max_context=MAX_CONTEXT).start()
        for role in (Role.PREFILL, Role.DECODE)
    ]
    router = RouterServer(
        RouterConfig(
            "router-0",
            ModelSettings(model, ("fake",)),
            controller.address,
            Secrets("secret"),
            mode=Mode.ADAPTIVE,
            grpc_port=0,
            http_port=0,
            api_keys=KEYS,
        )
    )
    endpoints = await router.start()
    await controller.set(*workers)
    await until(lambda: router.ready, "the router is ready")
    freeze_gc()  # as a router's process does
    pulse = _Pulse()
    print(json.dumps([endpoints.http_address, endpoints.grpc_address]), flush=True)
    while await lines.readline():
        held = len(router._dispatcher._live)
        state = RouterState(
            held, sum(len(fake.leases) + len(fake.tasks) for fake in workers), tuple(errors.texts), *pulse.take()
        )
        errors.texts.clear()
        print(json.dumps(asdict(state)), flush=True)
    await router.stop(0.0)
    for worker in workers:
        await worker.kill()
    await controller.stop()


async def _main() -> None:
    lines = asyncio.StreamReader(limit=_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await _serve(Path((await lines.readline()).decode().strip()), lines)


if __name__ == "__main__":
    set_switch_interval()
    asyncio.run(_main())
