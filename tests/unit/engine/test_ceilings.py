"""The ceilings of a device: the rounds that count, and the fallback if nothing can be measured."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import pytest
import torch

from tandem.cost_model.roofline import CPU, GPU
from tandem.engine import ceilings
from tandem.engine.ceilings import measure_ceilings

CORES = torch.device("cpu")


def clock_of(*seconds: float) -> Callable[[], float]:
    """Returns a clock on which so many seconds pass between one reading and the next."""
    moments = iter(accumulate(seconds, initial=0.0))
    return lambda: next(moments)


def test_the_fastest_round_counts() -> None:
    done: list[int] = []
    jobs: list[Callable[[], object]] = [lambda: done.append(0), lambda: done.append(1)]
    with ThreadPoolExecutor(2) as pool:
        # For each round: until it begins, how long it takes; then whether the time is up.
        best = ceilings._rounds(pool, jobs, 1.0, clock_of(0.1, 0.4, 0.1, 0.2, 0.1, 0.1, 0.3, 0.9))
    assert best == pytest.approx(0.2)
    assert sorted(done) == [0, 0, 0, 1, 1, 1]


def test_a_disturbed_round_and_a_lucky_one_do_not() -> None:
    assert ceilings._fast([9.0, 1.1, 0.2, 1.0, 5.0, 1.2, 1.3, 7.0]) == 1.1


def test_work_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads: the bytes and operations of all of them, by the seconds of a round."""
    monkeypatch.setattr(ceilings, "_CPU_READ_BYTES", 3 * 4096)
    monkeypatch.setattr(ceilings, "_CPU_MATRIX", 8)
    asked = []

    def rounds(_pool: object, jobs: list[Callable[[], object]]) -> float:
        asked.append(len([job() for job in jobs]))
        return 0.5 if len(asked) == 1 else 0.25

    monkeypatch.setattr(ceilings, "_rounds", rounds)
    before = torch.get_num_threads()
    measured = measure_ceilings(CORES, torch.float32, threads=3)
    assert (measured.bytes_per_s, measured.flops) == (3 * 4096 / 0.5, 3 * 2 * 8**3 / 0.25)
    assert asked == [3, 3]
    assert torch.get_num_threads() == before


def test_what_the_cores_do_not_know_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = []
    monkeypatch.setattr(ceilings, "_CPU_READ_BYTES", 4096)
    monkeypatch.setattr(ceilings, "_product", lambda dtype: dtypes.append(dtype) or (lambda: None))
    measure_ceilings(CORES, torch.bfloat16, threads=1)
    assert set(dtypes) == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize(("device", "typical"), [("cpu", CPU), ("cuda:0", GPU)])
def test_without_memory_a_typical_device(device: str, typical: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    measured = "_of_cpu" if device == "cpu" else "_of_gpu"
    monkeypatch.setattr(ceilings, measured, full)
    assert measure_ceilings(torch.device(device), torch.bfloat16) == typical
    monkeypatch.setattr(ceilings, measured, broken)
    with pytest.raises(RuntimeError, match="a defect"):
        measure_ceilings(torch.device(device), torch.bfloat16)
