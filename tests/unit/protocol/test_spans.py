"""Spans of a timeline: contiguous, additive, and robust to skewed clocks, retries and preemptions."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent, Timeline
from tandem.protocol.lifecycle.spans import Span, last_attempt, seconds_by_phase, spans_of

MS = 10**6
WHOLE = (
    ("RECEIVED", 0), ("TOKENIZED", 1), ("PLACED", 3), ("RESERVED", 5), ("PREFILL_QUEUED", 6), ("PREFILL_STARTED", 10),
    ("PREFILL_FINISHED", 50), ("TRANSFER_STARTED", 30), ("FIRST_TOKEN", 52), ("TRANSFER_FINISHED", 58),
    ("DECODE_ADMITTED", 60), ("DECODE_STARTED", 65), ("FINISHED", 200),
)  # fmt: skip
PREFILL = ("PREFILL_QUEUED", "PREFILL_STARTED", "PREFILL_FINISHED", "TRANSFER_STARTED", "TRANSFER_FINISHED")
DECODE = ("DECODE_ADMITTED", "DECODE_STARTED")


def timeline_of(*event_times: tuple[str, int]) -> Timeline:
    stamps = tuple(EventTime(LifecycleEvent[name], at * MS) for name, at in event_times)
    return Timeline(stamps, None, "prefill-0", "decode-0")


def drawn(timeline: Timeline) -> list[tuple[str, float, float, int]]:
    return [(s.phase, s.begin_nanos / MS, s.end_nanos / MS, s.attempt) for s in spans_of(timeline)]


def test_a_request_that_is_handed_over() -> None:
    timeline = timeline_of(*WHOLE)
    assert drawn(timeline) == [
        ("queue", 0, 10, 1), ("prefill", 10, 50, 1), ("transfer", 50, 65, 1), ("decode", 65, 200, 1),
    ]  # fmt: skip
    assert [span.worker for span in spans_of(timeline)] == ["", "prefill-0", "prefill-0", "decode-0"]


def test_one_token_alone_and_one_worker_alone() -> None:
    short = timeline_of(
        *[event for event in WHOLE if event[0] not in (*DECODE, "TRANSFER_STARTED", "TRANSFER_FINISHED")]
    )
    assert drawn(short)[-2:] == [("prefill", 10, 50, 1), ("decode", 50, 200, 1)]
    here = timeline_of(*[event for event in WHOLE if "TRANSFER" not in event[0]])
    assert drawn(here)[-2:] == [("prefill", 10, 50, 1), ("decode", 50, 200, 1)]


def test_events_come_in_any_order() -> None:
    """The decode worker's stream may be ahead of the prefill worker's."""
    first, placed, rest = WHOLE[:2], WHOLE[2], WHOLE[3:-1]
    assert drawn(timeline_of(*first, placed, *rest[::-1], WHOLE[-1])) == drawn(timeline_of(*WHOLE))


def test_a_try_that_failed_and_a_preemption() -> None:
    preempted = (*WHOLE[:-1], ("PREEMPTED", 100))
    again = [(name, at + 150) for name, at in WHOLE if name not in ("RECEIVED", "TOKENIZED", "FIRST_TOKEN")]
    assert drawn(timeline_of(*preempted, ("REQUEUED", 110), *again))[3:] == [
        ("decode", 65, 100, 1), ("queue", 100, 110, 1), ("queue", 110, 160, 2), ("prefill", 160, 200, 2),
        ("transfer", 200, 215, 2), ("decode", 215, 350, 2),
    ]  # fmt: skip
    # The workers of the first attempt sent nothing.
    dead = timeline_of(*WHOLE[:5], ("SILENT", 9), ("REQUEUED", 130), *again)
    assert drawn(dead)[:3] == [("queue", 0, 9, 1), ("stall", 9, 130, 1), ("queue", 130, 160, 2)]
    assert [span.worker for span in spans_of(dead)][-1] == "decode-0"


def test_a_death_amid_an_answer() -> None:
    """Each attempt has its workers' phases; the silence is a separate one, whatever a dead worker's clock said."""
    again = [(name, at + 2000) for name, at in WHOLE if name not in ("RECEIVED", "TOKENIZED", "FIRST_TOKEN")]
    for ahead in (0, 100, 90_000, -90_000):
        first = [(name, at + ahead * (name in DECODE)) for name, at in WHOLE[:-1]]
        timeline = timeline_of(*first, ("SILENT", 150), ("REQUEUED", 1990), *again)
        spans = drawn(timeline)
        assert [(phase, number) for phase, *_, number in spans] == [
            ("queue", 1), ("prefill", 1), ("transfer", 1), ("decode", 1), ("stall", 1),
            ("queue", 2), ("prefill", 2), ("transfer", 2), ("decode", 2),
        ]  # fmt: skip
        assert spans[4:6] == [("stall", 150, 1990, 1), ("queue", 1990, 2010, 2)]
        took = seconds_by_phase(spans_of(timeline))
        assert sum(took.values()) == pytest.approx(2.2)
        assert took["prefill"] == pytest.approx(0.08)
        assert took["stall"] == pytest.approx(1.84)
        assert seconds_by_phase(spans_of(timeline), 52 * MS)["queue"] == pytest.approx(0.01)
        assert last_attempt(timeline).at(LifecycleEvent.PREFILL_STARTED) == 2010 * MS


def test_a_first_token_that_leaves_late_bends_no_later_try() -> None:
    """A token that was not yet delivered when its worker died is no event of the next attempt's prefill."""
    again = [(name, at + 150) for name, at in WHOLE if name not in ("RECEIVED", "TOKENIZED", "FIRST_TOKEN")]
    late = timeline_of(*WHOLE[:8], ("REQUEUED", 60), ("FIRST_TOKEN", 61), *again)
    assert ("prefill", 160, 200, 2) in drawn(late)


def test_clocks_that_do_not_agree() -> None:
    """Durations on a host with a skewed clock are kept where they fit between the router's own events."""
    for prefill, decode in ((90_000, -90_000), (-90_000, 90_000), (-4, 3)):
        shifts = dict.fromkeys(PREFILL, prefill) | dict.fromkeys(DECODE, decode)
        spans = drawn(timeline_of(*[(name, at + shifts.get(name, 0)) for name, at in WHOLE]))
        assert [phase for phase, *_ in spans] == ["queue", "prefill", "transfer", "decode"]
        assert (spans[0][1], spans[-1][2]) == (0, 200)
        assert spans[1][2] - spans[1][1] == 40  # the prefill
        assert 5 <= spans[1][1] <= 12  # after it was reserved, and in time for the first token
        assert spans[3][1] >= spans[1][2]


def test_what_has_not_ended_has_none() -> None:
    assert spans_of(timeline_of(*WHOLE[:-1])) == ()
    assert drawn(timeline_of(("RECEIVED", 1), ("FINISHED", 9))) == [("queue", 1, 9, 1)]


@given(st.lists(st.tuples(st.sampled_from([e.name for e in LifecycleEvent]), st.integers(-100, 300)), max_size=20))
def test_they_always_add_up(event_times: list[tuple[str, int]]) -> None:
    inner = [event for event in event_times if event[0] not in ("RECEIVED", "FINISHED")]
    spans: tuple[Span, ...] = spans_of(timeline_of(("RECEIVED", 0), *inner, ("FINISHED", 200)))
    assert (spans[0].begin_nanos, spans[-1].end_nanos) == (0, 200 * MS)
    assert all(a.end_nanos == b.begin_nanos for a, b in pairwise(spans))
    assert all(span.end_nanos > span.begin_nanos for span in spans)
