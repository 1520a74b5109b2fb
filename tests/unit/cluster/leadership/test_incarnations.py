"""Incarnation numbers follow the order of starts, independent of any clock."""

import time

import pytest

from kv_transfer.removed_peers import RemovedPeers
from tandem.cluster.supervision.incarnations import Incarnations, generation_of
from tandem.protocol.messages import PeerRef

OF_AN_EARLIER_RELEASE = 1_790_000_000_000_000_000
"""A number of an earlier release, which numbered its workers by a clock, in nanoseconds."""


def test_each_is_above_all_before_it_also_where_a_clock_runs_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(10**9, 0, -1))
    monkeypatch.setattr(time, "time_ns", lambda: next(times))
    incarnations = Incarnations()
    numbers = [incarnations.next() for _ in range(1000)]
    incarnations.begin(1)
    numbers += [incarnations.next() for _ in range(1000)]
    assert numbers == sorted(set(numbers))
    assert {generation_of(number) for number in numbers[:1000]} == {0}
    assert {generation_of(number) for number in numbers[1000:]} == {1}


def test_another_generation_is_above_whatever_the_one_before_gave_out() -> None:
    first, second = Incarnations(), Incarnations()
    first.begin(7)
    second.begin(8)
    believed_dead = RemovedPeers()
    believed_dead.add(PeerRef("prefill-0", max(first.next() for _ in range(5000))))
    assert PeerRef("prefill-0", second.next()) not in believed_dead


def test_workers_of_a_release_that_went_by_clocks_are_below() -> None:
    incarnations = Incarnations()
    incarnations.begin(generation_of(OF_AN_EARLIER_RELEASE) + 1)
    assert OF_AN_EARLIER_RELEASE < incarnations.next() < 1 << 64


def test_clusters_that_know_nothing_of_each_other_use_different_ones() -> None:
    firsts = {Incarnations().next() for _ in range(20)}
    assert len(firsts) > 15
