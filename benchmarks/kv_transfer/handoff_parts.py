"""Divides hand-overs into named parts by the requests' timelines, and finds decode steps that overlap a transfer."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.protocol.lifecycle.events import LifecycleEvent, Timeline

_TO_MS = 1e3
_NANOS = 1e9
_HANDOFF = {
    "computed_to_posted": LifecycleEvent.LAST_PAGES_POSTED,
    "posted_to_summed": LifecycleEvent.NOTICE_MADE,
    "summed_to_notice_posted": LifecycleEvent.NOTICE_POSTED,
    "notice_posted_to_written": LifecycleEvent.TRANSFER_FINISHED,
    "written_to_seen": LifecycleEvent.NOTICE_SEEN,
    "seen_to_checked": LifecycleEvent.KV_CHECKED,
    "checked_to_joined": LifecycleEvent.DECODE_ADMITTED,
    "joined_to_first_step": LifecycleEvent.DECODE_STARTED,
}
"""The parts of a hand-over after PREFILL_FINISHED, in order; each part ends with the given lifecycle event.

The write of the last page, which carries the notice, is posted after all other pages have arrived. The two processes
run on one host and use the same clock.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client sees it: the arrival time of each chunk in seconds, and the cluster's timeline."""

    moments: tuple[float, ...]
    timeline: Timeline

    def ms(self, start: LifecycleEvent, end: LifecycleEvent) -> float:
        """Return the milliseconds between two lifecycle events. Raises RuntimeError if one is missing."""
        seconds = self.timeline.seconds(start, end)
        if seconds is None:
            raise RuntimeError(f"a request without {start.name} or {end.name}")
        return seconds * _TO_MS

    @property
    def gaps_ms(self) -> list[float]:
        """The gaps between chunks in milliseconds."""
        return [(b - a) * _TO_MS for a, b in zip(self.moments, self.moments[1:], strict=False)]


def handoffs_ms(answers: Sequence[Answer]) -> list[float]:
    """Return the times from the end of the last prefill chunk to the request's first decode step, in milliseconds."""
    return [answer.ms(LifecycleEvent.PREFILL_FINISHED, LifecycleEvent.DECODE_STARTED) for answer in answers]


def handoff_parts_ms(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the mean of each part in milliseconds; the parts sum up to the mean hand-over."""
    begins = [LifecycleEvent.PREFILL_FINISHED, *_HANDOFF.values()]
    return {
        name: round(statistics.mean(answer.ms(begin, end) for answer in answers), 4)
        for begin, (name, end) in zip(begins, _HANDOFF.items(), strict=False)
    }


def gaps_meeting_transfers_ms(stream: Answer, prompts: Sequence[Answer]) -> list[float]:
    """Return the gaps between tokens of `stream` that overlap transfers of `prompts`, in milliseconds.

    A gap in which one of `prompts` joined the decode batch is left out. Only overlaps that are certain count: a
    prompt's timeline has the start of its first write, and the start and end of the last chunk's writes, but not the
    times of the writes in between. Tokens arrive later than their steps by a fraction of a step. Arrivals and timelines
    use the clock of one host.
    """
    moving = [span for answer in prompts for span in _moving(answer)]
    joined = {_nearest(stream.moments, answer.moments[-1]) for answer in prompts}
    return [
        gap
        for n, gap in enumerate(stream.gaps_ms[1:], start=2)
        if n not in joined and any(begin <= stream.moments[n] and stream.moments[n - 1] <= end for begin, end in moving)
    ]


def _moving(answer: Answer) -> list[tuple[float, float]]:
    """Return the intervals, in Unix seconds, in which pages were certainly in transfer.

    They are the start of the first write, and the time from the start to the end of the last chunk's writes.
    """
    event_times = (LifecycleEvent.TRANSFER_STARTED, LifecycleEvent.LAST_PAGES_POSTED, LifecycleEvent.TRANSFER_FINISHED)
    nanos = [answer.timeline.at(event) for event in event_times]
    first, posted, finished = (None if event_nanos is None else event_nanos / _NANOS for event_nanos in nanos)
    if first is None or posted is None or finished is None:
        raise RuntimeError("a request without a transfer")
    return [(first, first), (posted, finished)]


def _nearest(moments: Sequence[float], moment: float) -> int:
    """Return the index of the time closest to `moment`, because the tokens of one step arrive together."""
    return min(range(len(moments)), key=lambda n: abs(moments[n] - moment))
