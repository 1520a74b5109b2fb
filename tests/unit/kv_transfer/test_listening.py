"""The clock of the time spent polling."""

import time

import pytest

from kv_transfer.nixl_backend.transport import LOOK_GAP_S, Listening


def test_only_close_looks_count_as_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    here = Listening()
    for after_s in (LOOK_GAP_S / 2, 2 * LOOK_GAP_S, LOOK_GAP_S / 2):
        now[0] += after_s
        here.poll()
    assert here.seconds == pytest.approx(LOOK_GAP_S)
