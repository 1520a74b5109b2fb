"""The gaps of a stream that count as steps during a transfer."""

import pytest

from benchmarks.kv_transfer.handoff_parts import Answer, gaps_meeting_transfers_ms
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent, Timeline

_MS = 1e-3


def answer(arrivals_ms: list[float], first: float | None = None, posted: float = 0, finished: float = 0) -> Answer:
    event_times = {
        LifecycleEvent.TRANSFER_STARTED: first,
        LifecycleEvent.LAST_PAGES_POSTED: posted,
        LifecycleEvent.TRANSFER_FINISHED: finished,
    }
    stamps = [EventTime(event, int(ms * 1e6)) for event, ms in event_times.items() if ms is not None]
    return Answer(tuple(ms * _MS for ms in arrivals_ms), Timeline(tuple(stamps), None, "p", "d"))


STREAM = answer([0, 1, 11, 22, 34, 47, 61, 76])
"""A stream with gaps of 1, 10, 11, … 15 ms."""


def test_the_first_writes_step_and_all_steps_of_the_last_writes() -> None:
    prompt = answer([1000, 1001], first=15, posted=40, finished=50)
    assert gaps_meeting_transfers_ms(STREAM, [prompt]) == pytest.approx([11, 13, 14])


def test_the_step_that_the_request_joins_is_left_out() -> None:
    prompt = answer([50, 61.4], first=15, posted=40, finished=50)
    assert gaps_meeting_transfers_ms(STREAM, [prompt]) == pytest.approx([11, 13])


def test_the_gap_before_a_streams_own_first_step_never_counts() -> None:
    prompt = answer([1000, 1001], first=0.5, posted=0.6, finished=0.7)
    assert gaps_meeting_transfers_ms(STREAM, [prompt]) == []


def test_a_request_that_was_not_handed_over_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="without a transfer"):
        gaps_meeting_transfers_ms(STREAM, [answer([1])])
