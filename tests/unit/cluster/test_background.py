"""A task without an awaiting caller does not fail silently."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tandem.cluster import background
from tandem.cluster.background import begin, going_on
from tandem.protocol.errors import Unavailable

from .crew import until


@pytest.mark.parametrize(
    ("error", "level", "said"),
    [
        (KeyError("a defect"), logging.ERROR, "a thing failed"),
        (Unavailable("nobody is there"), logging.INFO, "a thing: nobody is there"),
    ],
)
async def test_a_failure_that_is_not_awaited_is_logged(
    error: Exception, level: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise error

    caplog.set_level(logging.INFO)
    task = begin(fail(), "a thing")
    await until(lambda: caplog.records)
    assert task.done()
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (level, said)


async def test_who_is_cancelled_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    task = begin(asyncio.Event().wait(), "waiting")
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    assert not caplog.records


async def test_what_has_to_go_on_does(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(background, "AGAIN_S", 0.0)
    failures = [OSError("one"), OSError("two")]

    async def run() -> None:
        if failures:
            raise failures.pop()

    await going_on(run, "a thing")
    assert caplog.text.count("a thing failed; restarting it") == 2
