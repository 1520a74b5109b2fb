"""The manual fabric keeps the contract except for its documented deviations."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kv_transfer.base import PageWrite
from kv_transfer.in_memory import InMemoryTransport
from kv_transfer.in_memory_fabric import InFlightWrite, InMemoryFabric
from kv_transfer.layout import KVLayout
from tandem.protocol.errors import TransferFailed
from tandem.protocol.messages import Lease, PeerRef, TransferNotice

PAGES = 6
PREFILL, DECODE = PeerRef("prefill-0", 1), PeerRef("decode-0", 1)
NOTICE = TransferNotice(Lease("r", 1, 1), PREFILL, b"h", 2, 7, 1)


@dataclass
class Pair:
    now: float = 0.0
    landed: list[tuple[int, int]] = field(default_factory=list)
    notices: list[TransferNotice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fabric = InMemoryFabric(lambda: self.now, schedule=lambda _: None, on_page=self.landing)
        self.memory = np.zeros((2, PAGES, 8), dtype="<i4")
        self.memory[0] = np.arange(PAGES * 8).reshape(PAGES, 8) + 1
        self.prefill, self.decode = (
            InMemoryTransport(self.fabric, self.layout(at), peer, self.notices.append)
            for at, peer in enumerate((PREFILL, DECODE))
        )
        self.prefill.add_peer(self.decode.describe())

    def layout(self, at: int) -> KVLayout:
        return KVLayout(self.memory[at].ctypes.data, PAGES, 1, 1, 4, (1, 1), 4, "int32")

    def landing(self, posted: InFlightWrite, local: int, remote: int) -> None:
        assert posted.sender == PREFILL
        self.landed.append((local, remote))

    def write(self, local: list[int], remote: list[int], notice: TransferNotice | None = None) -> Any:
        return self.prefill.write(PageWrite(DECODE, local, remote, notice), deadline_s=1.0)


def test_pages_land_one_by_one_and_the_notice_last() -> None:
    pair = Pair()
    future = pair.write([0, 1], [4, 5], NOTICE)
    (posted,) = pair.fabric.writes
    pair.fabric.land(posted, 1)
    assert pair.landed == [(0, 4)]
    assert not future.done()
    assert not pair.fabric.notices
    pair.fabric.land(posted)
    np.testing.assert_array_equal(pair.memory[1, 4:], pair.memory[0, :2])
    assert future.result().bytes == 64
    (late,) = pair.fabric.notices
    pair.fabric.deliver(late, again=True)
    pair.fabric.deliver(late)
    assert pair.notices == [NOTICE, NOTICE]
    assert not pair.fabric.notices


@pytest.mark.parametrize("notice", [None, NOTICE])
def test_after_its_deadline_a_write_has_failed_unless_its_notice_left(notice: TransferNotice | None) -> None:
    pair = Pair()
    future = pair.write([0], [1], notice)
    pair.now = 2.0
    pair.fabric.land(pair.fabric.writes[0])
    assert (future.exception() is None) == (notice is not None)


def test_a_write_that_fails_after_its_notice_is_not_pending() -> None:
    pair = Pair()
    future = pair.write([0, 1], [4, 5], NOTICE)
    pair.fabric.land(pair.fabric.writes[0], 1)
    pair.fabric.fail(pair.fabric.writes[0], after_notice=True)
    assert isinstance(future.exception(), TransferFailed)
    assert not pair.fabric.writes
    assert len(pair.fabric.notices) == 1
    assert pair.memory[1, 5].any()


@pytest.mark.parametrize("dies", [False, True])
def test_a_failed_write_leaves_pages_that_land_as_they_were_until_it_rests(dies: bool) -> None:
    pair = Pair()
    before = pair.memory[0].copy()
    future = pair.write([0, 1, 2], [3, 4, 5], NOTICE)
    late = pair.fabric.writes[0]
    pair.fabric.land(late, 1)
    pair.fabric.fail(late)
    assert isinstance(future.exception(), TransferFailed)
    pair.memory[0] = 99
    if dies:
        pair.fabric.kill(PREFILL)
    pair.fabric.land(late, 1)
    np.testing.assert_array_equal(pair.memory[1, 4], before[1])
    pair.fabric.rest(late)
    assert not pair.fabric.writes
    assert not pair.memory[1, 5].any()
    assert not pair.fabric.notices


def test_the_notice_of_a_write_that_failed_never_arrives() -> None:
    pair = Pair()
    pair.write([0], [4], NOTICE)
    pair.fabric.fail(pair.fabric.writes[0])
    pair.fabric.land(pair.fabric.writes[0])
    assert not pair.fabric.writes
    assert not pair.fabric.notices


def test_pages_of_a_dead_writer_land_as_they_were_until_it_is_buried() -> None:
    pair = Pair()
    before = pair.memory[0].copy()
    future = pair.write([0, 1], [4, 5], NOTICE)
    pair.fabric.kill(PREFILL)
    pair.memory[0] = 99
    pair.fabric.land(pair.fabric.writes[0], 1)
    np.testing.assert_array_equal(pair.memory[1, 4], before[0])
    pair.fabric.remove_dead(PREFILL)
    assert not pair.fabric.writes
    assert not future.done()
    assert not pair.memory[1, 5].any()


def test_writes_to_a_dead_process_fail_and_their_notices_are_lost() -> None:
    pair = Pair()
    pair.write([0], [1], NOTICE)
    pair.fabric.land(pair.fabric.writes[0])
    future = pair.write([0], [2])
    pair.fabric.kill(DECODE)
    pair.fabric.deliver(pair.fabric.notices[0])
    assert isinstance(future.exception(), TransferFailed)
    assert not pair.notices
    assert pair.landed == [(0, 1)]
