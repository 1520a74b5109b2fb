"""A worker that has heard no controller for long enough ends, whatever goes wrong on the way."""

from __future__ import annotations

import time

import pytest

from tandem.protocol.errors import Internal
from tandem.protocol.messages import PeerRef
from tandem.worker import actor
from tandem.worker.actor import WorkerActor


class Process:
    """One that cannot drain."""

    silent_s = 1e9
    serves = True

    def drain(self, grace_s: float) -> None:
        raise Internal(f"it is stuck, and was given {grace_s:g} s")

    def stop(self) -> None:
        raise AssertionError("it does not come to that")


async def test_a_place_is_given_back_by_a_worker_that_cannot_drain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr(actor, "release_own_group", lambda: given_back.append(True))
    alone = WorkerActor.__new__(WorkerActor)
    alone._me = PeerRef("decode-0", 1)
    alone._process = Process()  # type: ignore[assignment]
    alone._called_at = time.monotonic() - 1e9
    alone._outlive_s = 1.0
    await alone._end_alone()
    assert given_back == [True]
    assert "decode-0 did not end in order" in caplog.text
