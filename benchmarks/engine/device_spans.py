"""The kernels and copies of a device, as recorded by a torch profiler, and the idle time between them."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

_COPY = "Memcpy"


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """One kernel or copy, from `start` to `end` in microseconds of its trace."""

    start: float
    end: float
    name: str

    @property
    def copies(self) -> bool:
        """True if the span is a copy."""
        return self.name.startswith(_COPY)


def record_spans(run: Callable[[], object]) -> list[Span]:
    """Record the device's work during `run`, sorted by start time."""
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    return sorted(
        Span(event.time_range.start, event.time_range.end, event.name)
        for event in trace.events()
        if event.device_type == DeviceType.CUDA
    )


def last_steps(spans: Sequence[Span], steps: int, of: int) -> Sequence[Span]:
    """Return the spans of the last `steps` steps, given the spans of `of` steps that all launch the same kernels."""
    return spans[len(spans) * (of - steps) // of :]


def idle_share(spans: Sequence[Span]) -> float:
    """Return the share of the time from the first start to the last end during which nothing ran."""
    return sum(gap for gap, _ in _gaps(spans)) / _whole(spans)


def idle_share_next_to_copies(spans: Sequence[Span]) -> float:
    """Return the share of the time that is idle before or after a copy, i.e. between decode steps.

    A decode step begins and ends with a copy.
    """
    return sum(gap for gap, next_to_copy in _gaps(spans) if next_to_copy) / _whole(spans)


def added_time(spans: Sequence[Span]) -> dict[str, float]:
    """Return, by kernel name, the microseconds that kernels add to the total time.

    A kernel adds the time by which it ends later than all kernels that started before it.
    """
    added: dict[str, float] = defaultdict(float)
    for span, ended in zip(spans, chain((spans[0].start,), _ends(spans)), strict=False):
        added[span.name] += max(0.0, span.end - max(span.start, ended))
    return dict(added)


def _gaps(spans: Sequence[Span]) -> Iterator[tuple[float, bool]]:
    """Yield the idle microseconds before each span except the first, and True if a copy precedes or follows the gap."""
    for (before, span), ended in zip(pairwise(spans), _ends(spans), strict=False):
        yield max(0.0, span.start - ended), before.copies or span.copies


def _ends(spans: Sequence[Span]) -> Iterator[float]:
    """Yield, for each span, the time at which it and all earlier spans have ended."""
    return accumulate((span.end for span in spans), max)


def _whole(spans: Sequence[Span]) -> float:
    return max(span.end for span in spans) - spans[0].start
