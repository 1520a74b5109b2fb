"""A GPU's ceilings, measured in the same run as the figures compared with them, and the device time of launches."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tandem.engine.ceilings import event_seconds

_COPY_BYTES = 4 << 30
_MATRIX = 8192
_TURNS, _IDLE_LAUNCHES, _LAUNCHES = 4, 3, 12
_HEAT_ROUNDS = 300

Contestant = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Copy bandwidth in bytes per second, reads and writes both counted, and the bf16 matrix rate in FLOP/s."""

    copy: float
    matrix: float


def measure_ceilings() -> Ceilings:
    """Measure both ceilings as medians of many runs."""
    return Ceilings(copy_bandwidth(), matrix_rate())


def copy_bandwidth() -> float:
    """Return the bandwidth of a large on-device copy in bytes per second, reads and writes both counted."""
    source = torch.randint(0, 127, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / median_seconds(lambda: target.copy_(source))


def matrix_rate() -> float:
    """Return the rate of an 8192³ bf16 matrix product of random numbers, in FLOP per second.

    The product runs unmeasured for one second, because an idle chip starts above its sustained clock.
    """
    a, b = (torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * _MATRIX**3 / median_seconds(lambda: torch.mm(a, b, out=out), rounds=400, warm=600)


def median_seconds(run: Callable[[], object], rounds: int = 15, warm: int = 5) -> float:
    """Return the median device time of `run` in seconds, measured by CUDA events.

    Rounds are launched without waiting for each other, after `warm` >= 1 unmeasured ones.
    """
    for _ in range(warm - 1):
        run()
    return statistics.median(event_seconds(run, rounds))


def graph_seconds(launch: Callable[[int], object], repeats: int) -> float:
    """Return the device seconds per launch.

    `launch(0)` to `launch(repeats - 1)` are captured in one CUDA graph, which is replayed.
    """
    for number in range(repeats):
        launch(number)  # loads code, which is not possible during a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(repeats):
            launch(number)
    return median_seconds(graph.replay, rounds=9, warm=2) / repeats


def race(contestants: Mapping[str, Contestant]) -> dict[str, float]:
    """Return the median device time of each contestant in microseconds; they run in turn on a heated chip.

    Without heating, a kernel measured after a pause, such as a compilation, would run above the clock that the power
    limit sustains.
    """
    for run in contestants.values():
        run()  # compiles
    _heat()
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in contestants}
    for _ in range(_TURNS):
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
    a, b = (torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(_HEAT_ROUNDS):
        a @ b
