"""When the device works: kernels and copies as a torch profiler saw them, and the time between them."""

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
        return self.name.startswith(_COPY)


def record_spans(run: Callable[[], object]) -> list[Span]:
    """What the device does for `run`, by its start."""
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    return sorted(
        Span(event.time_range.start, event.time_range.end, event.name)
        for event in trace.events()
        if event.device_type == DeviceType.CUDA
    )


def last_steps(spans: Sequence[Span], steps: int, of: int) -> Sequence[Span]:
    """Those of the last `steps` of `of` steps that launch the same kernels."""
    return spans[len(spans) * (of - steps) // of :]


def idle_share(spans: Sequence[Span]) -> float:
    """Of the time from the first start to the last end, the share in which nothing ran."""
    return sum(gap for gap, _ in _gaps(spans)) / _whole(spans)


def idle_share_beside_copies(spans: Sequence[Span]) -> float:
    """As `idle_share`, but only what lies before or after a copy: a decode step begins and ends with one."""
    return sum(gap for gap, beside_copy in _gaps(spans) if beside_copy) / _whole(spans)


def added_time(spans: Sequence[Span]) -> dict[str, float]:
    """Microseconds that each kernel adds, by name: its time after the end of all before it, as kernels overlap."""
    added: dict[str, float] = defaultdict(float)
    for span, ended in zip(spans, chain((spans[0].start,), _ends(spans)), strict=False):
        added[span.name] += max(0.0, span.end - max(span.start, ended))
    return dict(added)


def _gaps(spans: Sequence[Span]) -> Iterator[tuple[float, bool]]:
    """Microseconds before each span but the first in which nothing ran, and whether a copy is beside them."""
    for (before, span), ended in zip(pairwise(spans), _ends(spans), strict=False):
        yield max(0.0, span.start - ended), before.copies or span.copies


def _ends(spans: Sequence[Span]) -> Iterator[float]:
    """When each span and all before it have ended."""
    return accumulate((span.end for span in spans), max)


def _whole(spans: Sequence[Span]) -> float:
    return max(span.end for span in spans) - spans[0].start
