"""A process that Ray starts, without Ray: what is said of one that does not respond."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from tandem.cluster.ray_processes import ray_process
from tandem.cluster.ray_processes.ray_process import RayProcess
from tandem.protocol.errors import DeadlineExceeded


def remote(method: Callable[[], Awaitable[object]]) -> SimpleNamespace:
    return SimpleNamespace(remote=method)


async def never() -> None:
    await asyncio.Event().wait()


async def test_a_process_that_does_not_respond_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_process, "PID_TIMEOUT_S", 0.01)
    actor = SimpleNamespace(run=remote(lambda: asyncio.sleep(0)), start=remote(never), identity=remote(never))
    process = RayProcess(actor)
    with pytest.raises(DeadlineExceeded, match=r"did not respond within 0\.01 s; its host may be overloaded"):
        await process.pid()
    assert await process.ended()
