"""Hand-overs between workers whose ranks divide a model differently, over the in-memory fabric."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from kv_transfer.base import PageWrite
from kv_transfer.checksums import PageSums
from kv_transfer.in_memory import InMemoryTransport
from kv_transfer.in_memory_fabric import InMemoryFabric
from kv_transfer.layout import KVLayout
from kv_transfer.rank_plan import RankedPages, even_stages, pool_page_bytes
from kv_transfer.ranks.group_transport import SLACK_S, GroupTransport, rank_peer
from kv_transfer.ranks.page_sums import GroupPageSums
from kv_transfer.ranks.remote_transport import RemoteTransport
from kv_transfer.ranks.transport_server import CopyRankPages, serve_transport
from tandem.engine.cache.page_checksums import page_checksums
from tandem.engine.cache.paged_cache import kernel_view
from tandem.engine.config.kv import KvGroup
from tandem.engine.config.sharding import PagePart
from tandem.protocol.conversion import from_proto, to_proto
from tandem.protocol.errors import FailedPrecondition, TransferFailed
from tandem.protocol.generated.tandem.v1 import worker_pb2
from tandem.protocol.messages import Lease, PeerDescription, PeerRef, TransferNotice

PAGES, LAYERS, PAGE_TOKENS, DIM, PARTS = 6, 4, 4, 8, 2
PREFILL, DECODE = PeerRef("prefill-0", 1), PeerRef("decode-0", 3)
NOTICE = TransferNotice(Lease("r", 1, 1), PREFILL, b"", 3, 7, 1)
FROM, TO = [0, 2, 5], [1, 3, 4]


@dataclass
class Group:
    """A worker's transport, the pool of each of its ranks, and the notices that it has received."""

    transport: GroupTransport
    pages: RankedPages
    pools: list[np.ndarray]
    sums: GroupPageSums
    notices: list[TransferNotice]

    def part(self, whole: np.ndarray, rank: int) -> np.ndarray:
        """Returns a rank's heads of its layers of whole pages, as [pages, words]."""
        heads, layers = self.pages.heads(rank), self.pages.layers(rank)
        return whole[:, heads.start : heads.stop, layers[0] : layers[-1] + 1].reshape(len(whole), -1)

    def fill(self, whole: np.ndarray) -> None:
        for rank, pool in enumerate(self.pools):
            pool[:] = self.part(whole, rank)


def open_group(
    fabric: InMemoryFabric, me: PeerRef, layout: tuple[int, int], heads: int, *, in_processes: bool = False
) -> Group:
    """Opens a group of (tensor ranks, stages); `in_processes` puts a pipe before each rank but the first."""
    tensor_ranks, stages = layout
    pages = RankedPages(tensor_ranks, heads, even_stages(LAYERS, stages), PAGE_TOKENS, (DIM * 4,) * PARTS)
    pools, openers, sums = [], [], []
    for rank in range(pages.ranks):
        own_heads, own_layers = pages.heads(rank), pages.layers(rank)
        pool = np.zeros((PAGES, pages.page_bytes(rank) // 4), dtype=np.float32)
        memory = (pool.ctypes.data, PAGES, len(own_layers), len(own_heads), PAGE_TOKENS, (DIM,) * PARTS, 4)
        open_rank = partial(InMemoryTransport, fabric, KVLayout(*memory, "float32"), rank_peer(me, rank))
        group = KvGroup(own_layers, len(own_layers), len(own_heads), (DIM,) * PARTS)
        part = PagePart(heads, LAYERS, own_heads.start, own_layers[0])
        rank_sums: PageSums = page_checksums(kernel_view(torch.from_numpy(pool), group, PAGE_TOKENS), parts=[part])
        pools.append(pool)
        if rank and in_processes:
            here, there = Pipe()
            Thread(target=serve_transport, args=(there, open_rank, rank_sums, shares_nothing), daemon=True).start()
            remote = RemoteTransport(here, rank)
            openers.append(remote.open)
            sums.append(remote.sums)
        else:
            openers.append(open_rank)
            sums.append(rank_sums if rank == 0 else partial(begun, rank_sums))
    notices: list[TransferNotice] = []
    transport = GroupTransport(me, [pages], openers, notices.append)
    return Group(transport, pages, pools, GroupPageSums([pages], sums[0], sums[1:]), notices)


def shares_nothing(path: Path) -> CopyRankPages:
    raise AssertionError(path)


def begun(sums: PageSums, pages: list[int], filled: list[int], groups: list[int]) -> Future[Sequence[int]]:
    future: Future[Sequence[int]] = Future()
    future.set_result(sums(pages, filled, groups))
    return future


@contextmanager
def pair(
    source: tuple[int, int], target: tuple[int, int], heads: int, *, in_processes: bool = False
) -> Iterator[tuple[InMemoryFabric, Group, Group, np.ndarray]]:
    """Two groups that know each other, and the pages of the whole model that the source's ranks have."""
    fabric = InMemoryFabric()
    prefill = open_group(fabric, PREFILL, source, heads, in_processes=in_processes)
    decode = open_group(fabric, DECODE, target, heads, in_processes=in_processes)
    whole = np.random.default_rng(7).random((PAGES, heads, LAYERS, PARTS, PAGE_TOKENS, DIM), dtype=np.float32)
    prefill.fill(whole)
    prefill.transport.add_peer(decode.transport.describe())
    try:
        yield fabric, prefill, decode, whole
    finally:
        prefill.transport.close()
        decode.transport.close()
        fabric.close()


LAYOUTS = [
    ((1, 1), (1, 1), 6),
    ((1, 1), (2, 1), 6),
    ((2, 1), (1, 1), 6),
    ((2, 1), (2, 1), 6),
    ((3, 1), (1, 1), 6),
    ((2, 1), (6, 1), 6),
    ((2, 2), (1, 1), 6),
    ((1, 1), (2, 2), 6),
    ((1, 4), (3, 2), 6),
    ((2, 1), (4, 1), 2),
    ((4, 1), (2, 1), 1),
]


@pytest.mark.parametrize(("source", "target", "heads"), LAYOUTS)
@pytest.mark.parametrize("in_processes", [False, True])
def test_every_rank_gets_its_part_of_every_page_and_the_last_notice_comes_after_all_bytes(
    source: tuple[int, int], target: tuple[int, int], heads: int, in_processes: bool
) -> None:
    with pair(source, target, heads, in_processes=in_processes) as (fabric, prefill, decode, whole):
        first = prefill.transport.write(PageWrite(DECODE, FROM[:2], TO[:2]), 5.0)
        last = PageWrite(DECODE, FROM[2:], TO[2:], NOTICE, after=(first,))
        done = prefill.transport.write(last, 5.0).result(timeout=5)
        fabric.wait_until_idle()
        assert first.result().bytes + done.bytes == sum(len(FROM) * pool[0].nbytes for pool in decode.pools)
        for rank, pool in enumerate(decode.pools):
            expected = np.zeros_like(pool)
            expected[TO] = decode.part(whole, rank)[FROM]
            assert (pool == expected).all()
        wait_for_notices(decode)
        assert {notice.prefill for notice in decode.notices} == {PREFILL}
        assert {notice.parts for notice in decode.notices} == {len(decode.notices)}
        assert {notice.part for notice in decode.notices} == set(range(len(decode.notices)))


def wait_for_notices(group: Group) -> None:
    deadline = time.monotonic() + 5
    while len(group.notices) < (group.notices[0].parts if group.notices else 1) and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.parametrize(("source", "target", "heads"), LAYOUTS)
def test_checksums_are_equal_however_the_model_is_divided_and_see_a_changed_bit(
    source: tuple[int, int], target: tuple[int, int], heads: int
) -> None:
    filled = [PAGE_TOKENS, PAGE_TOKENS, 3]
    with pair(source, target, heads, in_processes=True) as (_, prefill, decode, whole):
        decode.fill(whole)
        sent = prefill.sums(FROM, filled)
        assert decode.sums(FROM, filled) == sent
        for pool in decode.pools:
            pool.view(np.uint32)[2, 5] ^= 1 << 9
            assert differs(decode, filled, sent)
            pool.view(np.uint32)[2, 5] ^= 1 << 9


def differs(group: Group, filled: list[int], sent: Sequence[int]) -> bool:
    try:
        return group.sums(FROM, filled) != sent
    except TransferFailed as error:
        return "different KV of the same heads" in error.message


def test_a_write_fails_only_when_the_writes_of_all_ranks_have_ended() -> None:
    fabric = InMemoryFabric(schedule=lambda _: None)
    prefill, decode = (open_group(fabric, me, (2, 1), 6) for me in (PREFILL, DECODE))
    prefill.transport.add_peer(decode.transport.describe())
    future = prefill.transport.write(PageWrite(DECODE, FROM, TO, NOTICE), 5.0)
    fabric.rest(fabric.writes[0])
    assert not future.done()
    fabric.land(fabric.writes[0])
    with pytest.raises(TransferFailed, match="connection broke"):
        future.result(timeout=0)


def test_a_write_that_a_rank_cannot_post_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no such page")

    with pair((2, 1), (1, 1), 6, in_processes=True) as (_, prefill, _, _):
        monkeypatch.setattr(InMemoryTransport, "write", refuse)
        remote = prefill.transport._ranks[1]
        for _ in range(2):
            with pytest.raises(TransferFailed, match="no such page"):
                remote.write(PageWrite(DECODE, FROM, TO), 5.0).result(timeout=5)


def test_the_write_of_a_pair_of_ranks_follows_its_own_earlier_write() -> None:
    fabric = InMemoryFabric(schedule=lambda _: None)
    prefill, decode = (open_group(fabric, me, (2, 1), 6) for me in (PREFILL, DECODE))
    prefill.transport.add_peer(decode.transport.describe())
    first = prefill.transport.write(PageWrite(DECODE, FROM[:1], TO[:1]), 5.0)
    last = prefill.transport.write(PageWrite(DECODE, FROM[1:], TO[1:], NOTICE, after=(first,)), 5.0)
    one, other = fabric.writes
    fabric.land(one)
    assert [write.sender for write in fabric.writes] == [other.sender, one.sender]
    fabric.fail(other)
    fabric.rest(other)
    fabric.land(fabric.writes[-1])
    with pytest.raises(TransferFailed, match="connection broke"):
        first.result(timeout=0)
    with pytest.raises(TransferFailed, match="depends on has failed"):
        last.result(timeout=0)
    assert len(fabric.notices) == 1, "the lease waits for the other notice"


def test_a_description_of_ranks_survives_the_wire() -> None:
    fabric = InMemoryFabric(schedule=lambda _: None)
    description = open_group(fabric, DECODE, (2, 2), 6).transport.describe()
    assert [rank.stage for rank in description.other_ranks] == [0, 1, 1]
    message = to_proto(description, worker_pb2.PeerDescription)
    parsed = worker_pb2.PeerDescription.FromString(message.SerializeToString())
    assert from_proto(parsed, PeerDescription) == description


def test_a_worker_that_restarts_with_fewer_ranks_is_written_to_in_its_new_layout() -> None:
    with pair((1, 1), (2, 1), 6) as (fabric, prefill, _, whole):
        reborn = replace(DECODE, incarnation=4)
        decode = open_group(fabric, reborn, (1, 1), 6)
        prefill.transport.add_peer(decode.transport.describe())
        with pytest.raises(TransferFailed, match="not a known peer"):
            prefill.transport.write(PageWrite(DECODE, FROM, TO), 5.0).result(timeout=5)
        prefill.transport.write(PageWrite(reborn, FROM, TO), 5.0).result(timeout=5)
        assert (decode.pools[0][TO] == decode.part(whole, 0)[FROM]).all()
        prefill.transport.remove_peer(reborn)
        with pytest.raises(TransferFailed, match="not a known peer"):
            prefill.transport.write(PageWrite(reborn, FROM, TO), 5.0).result(timeout=5)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    fabric = InMemoryFabric(schedule=lambda _: None)
    prefill, decode = open_group(fabric, PREFILL, (2, 1), 6), open_group(fabric, DECODE, (1, 1), 6)
    wrong = replace(decode.transport.describe(), page_bytes=48)
    with pytest.raises(FailedPrecondition, match=r"pages of decode-0 have 48 bytes"):
        prefill.transport.add_peer(wrong)


def group_of_clocks(clocks: list[float]) -> GroupTransport:
    """Returns a group of two ranks whose polling times are these clocks, which start at 0."""
    group = open_group(InMemoryFabric(schedule=lambda _: None), PREFILL, (2, 1), 6).transport
    for number, rank in enumerate(group._ranks):
        rank.transport_poll_s = partial(clocks.__getitem__, number)  # type: ignore[method-assign]
    group._polls = [0.0, 0.0]
    return group


def test_the_polling_time_of_a_group_grows_only_while_all_ranks_poll() -> None:
    clocks = [0.0, 0.0]
    group = group_of_clocks(clocks)
    start = group.transport_poll_s()
    clocks[0] = 5.0
    assert group.transport_poll_s() == start
    clocks[1] = 9.0
    assert group.transport_poll_s() <= start + SLACK_S + 1e-9
    clocks[:] = [6.0, 12.0]
    assert group.transport_poll_s() <= start + SLACK_S + 1.0 + 1e-9


def test_reports_of_different_times_do_not_slow_the_polling_time_of_a_group() -> None:
    clocks = [0.0, 0.0]
    group = group_of_clocks(clocks)
    start = group.transport_poll_s()
    for step in range(100):
        clocks[step % 2] += 2 * SLACK_S / 4
        group.transport_poll_s()
    assert group.transport_poll_s() - start == pytest.approx(min(clocks), abs=SLACK_S)


KV_AND_STATES = [
    RankedPages(1, 2, even_stages(LAYERS, 1), PAGE_TOKENS, (DIM * 4,) * PARTS),
    RankedPages(1, 8, even_stages(3, 1), 1, (96,), alignment=16),
]
"""Pages of two KV heads and four layers, and of the states of eight heads and three layers; the latter are larger."""
GROUPS = [0, 1, 0]


def shaped_worker(
    fabric: InMemoryFabric, me: PeerRef, tensor_ranks: int, stages: int, notices: list[TransferNotice]
) -> tuple[GroupTransport, list[np.ndarray], list[RankedPages]]:
    groups = [
        replace(group, tensor_ranks=tensor_ranks, stages=even_stages(sum(map(len, group.stages)), stages))
        for group in KV_AND_STATES
    ]
    return *ranked_worker(fabric, me, groups, notices), groups


def ranked_worker(
    fabric: InMemoryFabric, me: PeerRef, groups: Sequence[RankedPages], notices: list[TransferNotice]
) -> tuple[GroupTransport, list[np.ndarray]]:
    pools = [np.zeros((PAGES, pool_page_bytes(groups, rank)), dtype=np.uint8) for rank in range(groups[0].ranks)]
    openers = [
        partial(
            InMemoryTransport,
            fabric,
            KVLayout(pool.ctypes.data, PAGES, 1, 1, 1, (pool.shape[1],), 1, "uint8"),
            rank_peer(me, rank),
        )
        for rank, pool in enumerate(pools)
    ]
    return GroupTransport(me, groups, openers, notices.append), pools


def parts_of(whole: np.ndarray, pages: RankedPages, rank: int) -> np.ndarray:
    """Returns the bytes that a rank has of a page [heads, layers, bytes] of the whole model."""
    heads, layers = pages.heads(rank), pages.layers(rank)
    return whole[heads.start : heads.stop, list(layers)].ravel()


@pytest.mark.parametrize("source", [(1, 1), (2, 1), (4, 1), (2, 3)])
@pytest.mark.parametrize("target", [(1, 1), (2, 1), (8, 1), (1, 2)])
def test_pages_of_groups_of_different_shapes_arrive_on_every_rank(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    """With four and eight ranks, several of them have the same KV head, but each has its own heads of the states."""
    fabric, notices = InMemoryFabric(), list[TransferNotice]()
    prefill, sent, mine = shaped_worker(fabric, PREFILL, *source, [])
    decode, received, theirs = shaped_worker(fabric, DECODE, *target, notices)
    dice = np.random.default_rng(5)
    planes = [sum(group.plane_bytes) for group in KV_AND_STATES]
    whole = [
        dice.integers(0, 256, (KV_AND_STATES[group].kv_heads, len(KV_AND_STATES[group].stages[0]), planes[group]))
        for group in GROUPS
    ]
    for page, group, content in zip(FROM, GROUPS, whole, strict=True):
        for rank, pool in enumerate(sent):
            part = parts_of(content, mine[group], rank)
            pool[page, : len(part)] = part
    try:
        prefill.add_peer(decode.describe())
        first = prefill.write(PageWrite(DECODE, FROM[:1], TO[:1], groups=GROUPS[:1]), 5.0)
        last = PageWrite(DECODE, FROM[1:], TO[1:], NOTICE, after=(first,), groups=GROUPS[1:])
        prefill.write(last, 5.0).result(timeout=5)
        fabric.wait_until_idle()
        for page, group, content in zip(TO, GROUPS, whole, strict=True):
            for rank, pool in enumerate(received):
                part = parts_of(content, theirs[group], rank)
                assert (pool[page, : len(part)] == part).all(), (page, rank)
        assert {notice.parts for notice in notices} == {len(notices)}
    finally:
        prefill.close()
        decode.close()
        fabric.close()


def test_groups_with_one_kv_head_arrive_from_the_only_rank_that_writes() -> None:
    """Each rank has the only head, so a single pair of ranks writes the pages of all groups, which have one order."""
    fabric, notices = InMemoryFabric(), list[TransferNotice]()
    groups = [RankedPages(2, 1, even_stages(LAYERS, 1), PAGE_TOKENS, (DIM * 4,) * PARTS)] * len(FROM)
    prefill, sent = ranked_worker(fabric, PREFILL, groups, [])
    decode, (received,) = ranked_worker(fabric, DECODE, [replace(group, tensor_ranks=1) for group in groups], notices)
    for pool in sent:
        pool[:] = np.random.default_rng(5).integers(0, 256, pool.shape)
    try:
        prefill.add_peer(decode.describe())
        prefill.write(PageWrite(DECODE, FROM, TO, NOTICE, groups=range(len(FROM))), 5.0).result(timeout=5)
        fabric.wait_until_idle()
        assert (received[TO] == sent[0][FROM]).all()
        assert [notice.parts for notice in notices] == [1]
    finally:
        prefill.close()
        decode.close()
        fabric.close()
