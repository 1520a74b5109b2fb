"""Kernels for each dtype, made once: starting them compiles or loads machine code."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.kernels.cpu import CpuKernels

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps scalars as arrays of one number, which NumPy 2.4 no longer takes for a loop's bounds."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


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
