"""The criteria for the growth of a process that survives the restarts of others."""

from __future__ import annotations

import pytest

from .growth import GROWTH_BYTES_MAX, MIB, SETTLED_AFTER, Growth, Size, check_fds

POOL_BYTES = 40 * MIB


@pytest.mark.parametrize("fds", [[56, 57, 57], [75, 75, 75], [56, 57, 56], [56, 57, *[57] * 29], [56, 57, 58, 57, 57]])
def test_a_first_descriptor_and_none_afterwards(fds: list[int]) -> None:
    check_fds("router", fds)


@pytest.mark.parametrize("fds", [[56, 57, 58], [56, 56, 57], [56, 58, 58], [56, 57, *[58] * 9]])
def test_a_descriptor_more_is_found_with_two_restarts(fds: list[int]) -> None:
    with pytest.raises(AssertionError, match="router"):
        check_fds("router", fds)


def growth(memory: list[float]) -> Growth:
    """Returns the growth of one process with these memory sizes in MiB."""
    measured = Growth([], POOL_BYTES)
    measured.series["decode-0"] = [Size(round(mib * MIB), 75) for mib in memory]
    return measured


def test_memory_that_grows_with_each_restart_is_found_by_the_long_run() -> None:
    leaking = [300 + 0.25 * number for number in range(31)]
    growth(leaking[: SETTLED_AFTER + 1]).check()
    with pytest.raises(AssertionError, match="decode-0"):
        growth(leaking).check()


def test_memory_beyond_the_pool_is_found_by_two_restarts() -> None:
    growth([300, 340, 340]).check()
    with pytest.raises(AssertionError, match="decode-0"):
        growth([300, 300, 300 + (POOL_BYTES + GROWTH_BYTES_MAX) / MIB]).check()
