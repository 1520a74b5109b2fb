"""A NIXL that does not open: its worker says so in words and leaves no thread."""

import threading

import pytest

from kv_transfer import nixl_transport
from kv_transfer.layout import KVLayout
from kv_transfer.nixl_transport import NixlTransport
from wire.errors import TransferFailed
from wire.messages import PeerRef

LAYOUT = KVLayout(4096, 8, 1, 1, 1, 2, 4, "float32")


def test_one_that_takes_too_long_is_a_failure_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, threads = threading.Event(), threading.active_count()

    def hang(*_: object) -> None:
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
