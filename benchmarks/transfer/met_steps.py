"""Which decode steps met a transfer, as clients of streams see them: gaps between tokens beside prompts' timelines."""

from collections.abc import Sequence

from benchmarks.transfer.handover_parts import Answer
from wire.tracing.timeline import Edge

_NANOS = 1e9


def gaps_meeting_transfers_ms(stream: Answer, beside: Sequence[Answer]) -> list[float]:
    """Gaps of `stream` in which pages of one of `beside` were surely moving, but for those its step joined.

    Surely: a prompt's timeline says when its first write began, and when its last ones, those of the last chunk, began
    and ended; writes between these are not known by their moments. Arrivals are later than the steps they tell of by
    the way to the client, a fraction of a step. Moments and timelines are by the same clock, of one host.
    """
    moving = [span for answer in beside for span in _moving(answer)]
    joined = {_nearest(stream.moments, answer.moments[-1]) for answer in beside}
    return [
        gap
        for n, gap in enumerate(stream.gaps_ms[1:], start=2)
        if n not in joined and any(begin <= stream.moments[n] and stream.moments[n - 1] <= end for begin, end in moving)
    ]


def _moving(answer: Answer) -> list[tuple[float, float]]:
    """Seconds since 1970 between which pages moved: the moment of the first write, and the last chunk's writes."""
    edges = (Edge.TRANSFER_STARTED, Edge.LAST_PAGES_POSTED, Edge.TRANSFER_FINISHED)
    nanos = [answer.timeline.at(edge) for edge in edges]
    first, posted, finished = (None if each is None else each / _NANOS for each in nanos)
    if first is None or posted is None or finished is None:
        raise RuntimeError("a request without a transfer")
    return [(first, first), (posted, finished)]


def _nearest(moments: Sequence[float], moment: float) -> int:
    """Tokens of one step arrive together: which of `moments` comes closest."""
    return min(range(len(moments)), key=lambda n: abs(moments[n] - moment))
