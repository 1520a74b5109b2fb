import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from kv_transfer.base import PageWrite, WriteDone
from kv_transfer.in_memory import InMemoryTransport
from kv_transfer.in_memory_fabric import InMemoryFabric
from kv_transfer.layout import KVLayout
from tandem.protocol.errors import FailedPrecondition, TransferFailed
from tandem.protocol.messages import Lease, PeerRef, TransferNotice

PAGES = 12


class Worker:
    """A pool of random bytes and its transport."""

    def __init__(self, fabric: InMemoryFabric, name: str, incarnation: int = 1, head_dim: int = 8) -> None:
        shape = (PAGES, 2, 2, 1, 4, head_dim)
        self.pool = np.random.default_rng(zlib.crc32(name.encode())).random(shape, dtype=np.float32)
        self.layout = KVLayout(self.pool.ctypes.data, PAGES, 2, 1, 4, (head_dim, head_dim), 4, "float32")
        self.notices: list[TransferNotice] = []
        self.transport = InMemoryTransport(fabric, self.layout, PeerRef(name, incarnation), self.notices.append)


class Pair:
    def __init__(self) -> None:
        self.fabric = InMemoryFabric()
        self.prefill = Worker(self.fabric, "prefill-0")
        self.decode = Worker(self.fabric, "decode-0")
        self.prefill.transport.add_peer(self.decode.transport.describe())

    def write(self, local: list[int], remote: list[int], epoch: int | None = None) -> PageWrite:
        notice = None
        if epoch is not None:
            notice = TransferNotice(Lease("r", 1, epoch), self.prefill.transport.me, b"h", len(local), 7, 1)
        return PageWrite(self.decode.transport.me, local, remote, notice)

    def post(
        self, local: list[int], remote: list[int], epoch: int | None = None, deadline_s: float = 60.0
    ) -> "Future[WriteDone]":
        return self.prefill.transport.write(self.write(local, remote, epoch), deadline_s)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.fabric.close()


def test_pages_land_where_they_belong_and_nowhere_else(pair: Pair) -> None:
    before = pair.decode.pool.copy()
    done = pair.post([3, 0, 7], [11, 2, 5], 1).result(timeout=60)
    expected = before
    expected[[11, 2, 5]] = pair.prefill.pool[[3, 0, 7]]
    np.testing.assert_array_equal(pair.decode.pool, expected)
    assert done.bytes == 3 * pair.prefill.layout.page_bytes
    assert [notice.lease.epoch for notice in pair.decode.notices] == [1]


def test_the_notice_comes_after_the_bytes_and_on_the_fabric_s_thread(pair: Pair) -> None:
    seen: list[tuple[bool, bool]] = []
    main = threading.current_thread()

    def poll(notice: TransferNotice) -> None:
        equal = bool((pair.decode.pool[4] == pair.prefill.pool[1]).all())
        seen.append((equal, threading.current_thread() is not main))

    pair.decode.transport.on_notice = poll
    pair.post([1], [4], 1).result(timeout=60)
    assert seen == [(True, True)]


def test_held_writes_land_in_the_requested_order(pair: Pair) -> None:
    pair.fabric.hold()
    futures = [pair.post([i], [9], i) for i in (1, 2, 3)]
    assert not any(future.done() for future in futures)
    assert pair.decode.notices == []
    pair.fabric.release(lambda writes: writes[::-1])
    pair.fabric.wait_until_idle()
    assert [notice.lease.epoch for notice in pair.decode.notices] == [3, 2, 1]
    np.testing.assert_array_equal(pair.decode.pool[9], pair.prefill.pool[1])


def test_a_write_that_rests_after_its_deadline_fails_then_and_not_before(pair: Pair) -> None:
    pair.fabric.delay(2.0)
    late = pair.post([1], [4], deadline_s=1.0)
    with_notice = pair.post([2], [5], 1, deadline_s=1.0)
    with pytest.raises(TransferFailed, match="after its deadline"):
        late.result(timeout=60)
    assert with_notice.result(timeout=60).bytes == pair.prefill.layout.page_bytes
    np.testing.assert_array_equal(pair.decode.pool[4], pair.prefill.pool[1])


def test_a_write_that_starts_past_its_deadline_moves_nothing(pair: Pair) -> None:
    before = pair.decode.pool.copy()
    with pytest.raises(TransferFailed, match="before it began"):
        pair.post([1], [4], 1, deadline_s=0.0).result(timeout=60)
    np.testing.assert_array_equal(pair.decode.pool, before)


def test_a_failed_write_may_have_moved_some_pages_but_sends_no_notice(pair: Pair) -> None:
    before = pair.decode.pool.copy()
    pair.fabric.fail_next(after_pages=1)
    with pytest.raises(TransferFailed):
        pair.post([1, 2], [4, 5], 1).result(timeout=60)
    np.testing.assert_array_equal(pair.decode.pool[4], pair.prefill.pool[1])
    np.testing.assert_array_equal(pair.decode.pool[5], before[5])
    assert pair.decode.notices == []
    pair.post([1], [4], 2).result(timeout=60)
    assert [notice.lease.epoch for notice in pair.decode.notices] == [2]


def test_a_dropped_notice_is_the_only_thing_missing(pair: Pair) -> None:
    pair.fabric.drop_notices()
    pair.post([1], [4], 1).result(timeout=60)
    pair.post([2], [5], 2).result(timeout=60)
    np.testing.assert_array_equal(pair.decode.pool[[4, 5]], pair.prefill.pool[[1, 2]])
    assert [notice.lease.epoch for notice in pair.decode.notices] == [2]


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_death_fails_writes_in_flight_and_nothing_lands_after_it(pair: Pair, victim: str) -> None:
    before = pair.decode.pool.copy()
    pair.fabric.hold()
    future = pair.post([1], [4], 1)
    pair.fabric.kill(getattr(pair, victim).transport.me)
    with pytest.raises(TransferFailed, match="is gone"):
        future.result(timeout=60)
    pair.fabric.release()
    with pytest.raises(TransferFailed, match="gone"):
        pair.post([1], [4], 2).result(timeout=60)
    np.testing.assert_array_equal(pair.decode.pool, before)


def test_a_later_incarnation_replaces_the_earlier_and_an_earlier_one_is_ignored(pair: Pair) -> None:
    old = pair.decode.transport
    pair.fabric.kill(old.me)
    reborn = Worker(pair.fabric, "decode-0", incarnation=2)
    pair.prefill.transport.add_peer(reborn.transport.describe())
    pair.prefill.transport.add_peer(old.describe())
    with pytest.raises(TransferFailed, match="not a known peer"):
        pair.post([1], [4]).result(timeout=60)
    write = PageWrite(reborn.transport.me, [1], [4])
    pair.prefill.transport.write(write, 5.0).result(timeout=60)
    np.testing.assert_array_equal(reborn.pool[4], pair.prefill.pool[1])


def test_a_removed_peer_is_unknown_and_writes_in_flight_to_it_land(pair: Pair) -> None:
    pair.fabric.hold()
    future = pair.post([1], [4], 1)
    pair.prefill.transport.remove_peer(pair.decode.transport.me)
    pair.prefill.transport.remove_peer(PeerRef("nobody", 1))
    with pytest.raises(TimeoutError):
        future.result(timeout=0.05)
    pair.fabric.release()
    pair.fabric.wait_until_idle()
    np.testing.assert_array_equal(pair.decode.pool[4], pair.prefill.pool[1])
    assert len(pair.decode.notices) == 1
    for failed in (future, pair.post([1], [4])):
        with pytest.raises(TransferFailed):
            failed.result(timeout=60)


def test_removing_a_run_removes_earlier_ones_and_not_later_ones(pair: Pair) -> None:
    here, there = pair.prefill.transport, pair.decode.transport.me
    here.remove_peer(PeerRef(there.worker_id, there.incarnation - 1))
    pair.post([1], [4]).result(timeout=60)
    pair.fabric.hold()
    future = pair.post([1], [4])
    here.remove_peer(PeerRef(there.worker_id, there.incarnation + 1))
    pair.fabric.release()
    for failed in (future, pair.post([1], [4])):
        with pytest.raises(TransferFailed):
            failed.result(timeout=60)


def test_pools_of_other_page_sizes_are_refused(pair: Pair) -> None:
    other = Worker(pair.fabric, "decode-9", head_dim=16)
    with pytest.raises(FailedPrecondition, match="decode-9"):
        pair.prefill.transport.add_peer(other.transport.describe())


def test_cancelling_a_posted_write_does_nothing(pair: Pair) -> None:
    pair.fabric.hold()
    future = pair.post([1], [4], 1)
    assert not future.cancel()
    pair.fabric.release()
    assert future.result(timeout=60).bytes == pair.prefill.layout.page_bytes


def test_a_write_that_cannot_be_carried_fails_alone(pair: Pair) -> None:
    for broken in (pair.post([1], [PAGES]), pair.post([1, 2], [3])):
        with pytest.raises(TransferFailed, match="could not be carried"):
            broken.result(timeout=60)
    pair.post([1], [4]).result(timeout=60)


def test_close_is_idempotent_and_fails_writes_in_flight(pair: Pair) -> None:
    pair.fabric.hold()
    future = pair.post([1], [4])
    pair.prefill.transport.close()
    pair.prefill.transport.close()
    with pytest.raises(TransferFailed):
        future.result(timeout=60)
