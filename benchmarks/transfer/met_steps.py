"""Finds decode steps that coincide with a transfer: gaps between tokens against prompts' timelines."""

from collections.abc import Sequence

from benchmarks.transfer.handover_parts import Answer
from tandem.protocol.lifecycle.timeline import Edge

_NANOS = 1e9


def gaps_meeting_transfers_ms(stream: Answer, prompts: Sequence[Answer]) -> list[float]:
    """Returns the gaps of `stream` during which pages of one of `prompts` moved, without steps that a request joined.

    Only certain overlaps count: a prompt's timeline has the start of its first write, and start and end of the last
    chunk's writes; the times of the writes between are unknown. Tokens arrive later than their steps by a fraction of a
    step. Arrivals and timelines use the clock of one host.
    """
    moving = [span for answer in prompts for span in _moving(answer)]
    joined = {_nearest(stream.moments, answer.moments[-1]) for answer in prompts}
    return [
        gap
        for n, gap in enumerate(stream.gaps_ms[1:], start=2)
        if n not in joined and any(begin <= stream.moments[n] and stream.moments[n - 1] <= end for begin, end in moving)
    ]


def _moving(answer: Answer) -> list[tuple[float, float]]:
    """Returns the Unix times between which pages moved: the first write's start, and the last chunk's writes."""
    edges = (Edge.TRANSFER_STARTED, Edge.LAST_PAGES_POSTED, Edge.TRANSFER_FINISHED)
    nanos = [answer.timeline.at(edge) for edge in edges]
    first, posted, finished = (None if each is None else each / _NANOS for each in nanos)
    if first is None or posted is None or finished is None:
        raise RuntimeError("a request without a transfer")
    return [(first, first), (posted, finished)]


def _nearest(moments: Sequence[float], moment: float) -> int:
    """Returns the index of the time closest to `moment`, since tokens of one step arrive together."""
    return min(range(len(moments)), key=lambda n: abs(moments[n] - moment))
