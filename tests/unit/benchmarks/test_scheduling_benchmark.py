"""The benchmark of steps without a device, at a toy size."""

import asyncio

import pytest

from benchmarks.scheduling import Plan, measure
from wire.policy_name import PolicyName


@pytest.mark.parametrize("joining", [False, True])
def test_as_many_steps_are_counted_as_were_asked_for(joining: bool) -> None:
    times = asyncio.run(measure(Plan(3, 5, 0.001), PolicyName.CHUNKED, joining=joining))
    assert len(times.whole) == 5
    assert len(times.plan) == 6
    assert min(times.plan) > 0
    assert sum(times.plan[1:]) < sum(times.whole)
