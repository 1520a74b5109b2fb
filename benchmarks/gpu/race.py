"""Times kernels in turns on a chip at its working temperature.

A kernel measured after a pause, such as a compilation, would run above the clock that the power limit sustains.
"""

import statistics
from collections.abc import Callable, Mapping

import torch

_ROUNDS, _IDLE_LAUNCHES, _LAUNCHES = 4, 3, 12
_HEAT_SIZE, _HEAT_ROUNDS = 8192, 300

Contestant = Callable[[], object]


def race(contestants: Mapping[str, Contestant]) -> dict[str, float]:
    """Returns the median device time of each contestant in microseconds."""
    for run in contestants.values():
        run()  # compiles
    _heat()
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in contestants}
    for _ in range(_ROUNDS):
        for name, run in contestants.items():
            for _ in range(_IDLE_LAUNCHES):
                run()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(_LAUNCHES):
                run()
            end.record()
            marks[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: round(statistics.median(start.elapsed_time(end) for start, end in pairs) / _LAUNCHES * 1e3, 1)
        for name, pairs in marks.items()
    }


def _heat() -> None:
    a, b = (torch.randn(_HEAT_SIZE, _HEAT_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(_HEAT_ROUNDS):
        a @ b
