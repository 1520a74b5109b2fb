"""A NIXL that does not open: its worker reports that and leaves no thread."""

import threading
import time
from collections.abc import Callable

import pytest

from kv_transfer.layout import KVLayout
from kv_transfer.nixl_backend import transport as nixl_transport
from kv_transfer.nixl_backend.transport import LISTEN_S, REST_S, NixlTransport
from tandem.protocol.errors import TransferFailed
from tandem.protocol.messages import PeerRef

LAYOUT = KVLayout(4096, 8, 1, 1, 1, (2, 2), 4, "float32")


def test_one_that_takes_too_long_is_a_failure_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, threads = threading.Event(), threading.active_count()

    def hang(*_: object, **_settings: object) -> None:
        go_on.wait(60)
        raise TransferFailed("too late")

    monkeypatch.setattr(nixl_transport, "PoolAgent", hang)
    monkeypatch.setattr(nixl_transport, "START_TIMEOUT_S", 0.05)
    with pytest.raises(TransferFailed, match=r"NIXL has not opened within 0\.05 s; try `tandem doctor`"):
        NixlTransport(LAYOUT, PeerRef("w", 1), lambda _: None)
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "nixl":
            thread.join(60)
    assert threading.active_count() == threads


def test_an_error_of_every_step_is_met_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    enough = threading.Event()

    class Failing:
        """An agent and writes whose every call fails, except the expected ones."""

        def __getattr__(self, _: str) -> Callable[..., object]:
            return lambda *_: self

        def poll(self) -> None:
            if len(pauses) != 15:
                raise RuntimeError("the device is lost")
            pauses.append(0.0)

    class Clock:
        monotonic = staticmethod(time.monotonic)

        @staticmethod
        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) > 20:
                enough.set()

    failing = Failing()
    failing.__dict__.update(notice_due=True, reached=[], unfinished=False, handles=[])
    failing.__dict__.update(notices=lambda: [])
    monkeypatch.setattr(nixl_transport, "time", Clock)
    monkeypatch.setattr(nixl_transport, "PoolAgent", lambda *_, **_settings: failing)
    monkeypatch.setattr(nixl_transport, "Links", lambda *_: failing)
    monkeypatch.setattr(nixl_transport, "Writes", lambda *_: failing)
    transport = NixlTransport(LAYOUT, PeerRef("w", 1), lambda _: None)
    assert enough.wait(60)
    transport.close()
    doubled = [LISTEN_S * 2**index for index in range(15)]
    assert pauses[:15] == [min(pause, REST_S) for pause in doubled]
    assert pauses[14] == REST_S
    assert pauses[16] == LISTEN_S
