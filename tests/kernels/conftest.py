"""Kernels for each dtype, made once: starting them compiles or loads machine code."""

from collections.abc import Iterator

import pytest
import torch

from tandem.engine import model_runner
from tandem.engine.kernels.cpu.kernels import CpuKernels

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        from . import interpreter

        interpreter.mend(monkeypatch)
        # Two steps of each loaded engine, a second in the interpreter, which compiles nothing.
        monkeypatch.setattr(model_runner, "warm_up", lambda *_: None)


@pytest.fixture(scope="session")
def all_kernels() -> Iterator[dict[torch.dtype, CpuKernels]]:
    made = {dtype: CpuKernels(dtype, threads=2) for dtype in DTYPES}
    yield made
    for kernels in made.values():
        kernels.close()


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture
def kernels(all_kernels: dict[torch.dtype, CpuKernels], dtype: torch.dtype) -> CpuKernels:
    return all_kernels[dtype]
