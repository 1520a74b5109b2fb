"""Transfers are invented from a known latency and bandwidth; the fit has to find them."""

from collections.abc import Callable

import numpy as np
import pytest

from costs.transfer_cost import TransferCost
from wire.tracing.timeline import TransferStats

MIB = 1 << 20


def stats(size: int, seconds: float) -> TransferStats:
    return TransferStats(size, 1, "nixl", int(seconds * 1e9))


def play(
    cost: TransferCost,
    latency: float,
    bandwidth: float,
    *,
    count: int = 200,
    sizes: Callable[[np.random.Generator], int] = lambda rng: int(rng.integers(1, 1000)) * MIB,
    stalls: float = 0.0,
) -> None:
    rng = np.random.default_rng(3)
    for _ in range(count):
        size = sizes(rng)
        stalled = 30 if rng.random() < stalls else 1
        cost.observe(stats(size, (latency + size / bandwidth) * rng.lognormal(0, 0.05) * stalled))


@pytest.mark.parametrize(("latency", "bandwidth"), [(1e-3, 390e9), (5e-3, 20e9), (3e-4, 5e9)])
def test_latency_and_bandwidth_are_found(latency: float, bandwidth: float) -> None:
    cost = TransferCost()
    play(cost, latency, bandwidth)
    for size in (2 * MIB, 16 * MIB, 1000 * MIB):
        assert cost.seconds(size) == pytest.approx(latency + size / bandwidth, rel=0.15)


def test_a_stall_now_and_then_changes_little() -> None:
    cost = TransferCost()
    play(cost, 1e-3, 100e9, stalls=0.03)
    assert cost.seconds(100 * MIB) == pytest.approx(1e-3 + 100 * MIB / 100e9, rel=0.35)


def test_a_slower_path_is_followed() -> None:
    cost = TransferCost()
    play(cost, 1e-3, 100e9)
    play(cost, 4e-3, 10e9)
    assert cost.seconds(100 * MIB) == pytest.approx(4e-3 + 100 * MIB / 10e9, rel=0.15)


def test_transfers_of_one_size_tell_of_that_size() -> None:
    cost = TransferCost()
    play(cost, 1e-3, 100e9, count=5000, sizes=lambda _: 64 * MIB)
    assert cost.seconds(64 * MIB) == pytest.approx(1e-3 + 64 * MIB / 100e9, rel=0.1)
    assert 0 < cost.seconds(1) <= cost.seconds(64 * MIB) <= cost.seconds(1000 * MIB)


def test_nothing_moves_in_no_time() -> None:
    cost = TransferCost()
    before = cost.seconds(MIB)
    cost.observe(stats(0, 1.0))
    cost.observe(stats(MIB, 0.0))
    assert cost.seconds(0) == 0.0
    assert cost.seconds(MIB) == before
