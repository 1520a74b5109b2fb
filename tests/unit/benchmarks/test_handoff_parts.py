"""The parts of a hand-over add up to the whole."""

import random

import pytest

from benchmarks.kv_transfer.handoff_parts import Answer, handoff_parts_ms, handoffs_ms
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent, Timeline

ORDER = [
    LifecycleEvent.PREFILL_FINISHED,
    LifecycleEvent.LAST_PAGES_POSTED,
    LifecycleEvent.NOTICE_MADE,
    LifecycleEvent.NOTICE_POSTED,
    LifecycleEvent.TRANSFER_FINISHED,
    LifecycleEvent.NOTICE_SEEN,
    LifecycleEvent.KV_CHECKED,
    LifecycleEvent.DECODE_ADMITTED,
    LifecycleEvent.DECODE_STARTED,
]


def answer(moments_ms: list[float]) -> Answer:
    stamps = [EventTime(event, int(ms * 1e6)) for event, ms in zip(ORDER, moments_ms, strict=True)]
    return Answer((), Timeline(tuple(stamps), None, "p", "d"))


def test_each_part_is_named_and_they_add_up_to_the_hand_over() -> None:
    draw = random.Random(1)
    answers = [answer(sorted(1000 + 5 * draw.random() for _ in ORDER)) for _ in range(7)]
    parts = handoff_parts_ms(answers)
    assert sum(parts.values()) == pytest.approx(sum(handoffs_ms(answers)) / len(answers), abs=1e-3)
    assert handoff_parts_ms([answer([0, 1, 3, 6, 10, 15, 21, 28, 36])]) == {
        "computed_to_posted": 1,
        "posted_to_summed": 2,
        "summed_to_notice_posted": 3,
        "notice_posted_to_written": 4,
        "written_to_seen": 5,
        "seen_to_checked": 6,
        "checked_to_joined": 7,
        "joined_to_first_step": 8,
    }
