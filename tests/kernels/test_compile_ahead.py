"""Kernels of many trials are compiled concurrently, each once.

On a machine without a GPU nothing is compiled, so the test simulates Triton: the call of its hook before it compiles,
and the return value of a launch then.
"""

import logging
import threading
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from tandem.engine.cuda.compile_ahead import run_side_by_side

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("set_device", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)


def launch(name: str, key: str, compiled: list[str], gate: threading.Barrier | None = None) -> str | None:
    """Launches as Triton does: calls its hook, and compiles unless that returns True."""
    hook = knobs.runtime.jit_cache_hook
    assert hook is not None
    if gate is not None:
        gate.wait(timeout=60)
    if hook(key=key, repr="", fn=SimpleNamespace(module="m", name=name), compile={}, is_manual_warmup=False):
        return None
    compiled.append(f"{name} {key}")
    return "a kernel"


def test_a_kernel_of_many_trials_is_compiled_once() -> None:
    compiled: list[str] = []
    gate = threading.Barrier(4)
    trials = {f"trial {n}": lambda: launch("norm", "bf16", compiled, gate) for n in range(4)}
    run_side_by_side(trials, CPU)
    assert compiled == ["norm bf16"]


def test_other_kernels_are_others() -> None:
    compiled: list[str] = []
    wanted = [("norm", "bf16"), ("norm", "fp32"), ("rope", "bf16")]
    run_side_by_side({str(variant): lambda variant=variant: launch(*variant, compiled) for variant in wanted}, CPU)  # type: ignore[misc]
    assert sorted(compiled) == ["norm bf16", "norm fp32", "rope bf16"]


def test_the_jit_cache_hook_is_restored() -> None:
    before = knobs.runtime.jit_cache_hook
    run_side_by_side({}, CPU)
    assert knobs.runtime.jit_cache_hook is before


def test_a_trial_that_fails_is_named(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    def fail() -> None:
        raise ValueError("too many warps")

    with caplog.at_level(logging.WARNING):
        run_side_by_side({"the step of 3 rows": fail, "another": done.set}, CPU)
    assert caplog.messages == ["the step of 3 rows was not compiled ahead: too many warps"]
    assert done.is_set()
