"""No launch waits for the device: any kind of draw, with graphs and without, one step ahead of the last one read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import PendingStep, StepBatch
from tandem.protocol.messages import SamplingParams
from tests.gpu.scheduled_steps import Request, launch_ahead

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

NEW = 12
SAMPLING = [
    SamplingParams(NEW, temperature=0.0),
    SamplingParams(NEW, temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, seed=3),
    SamplingParams(NEW, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
    SamplingParams(NEW, logprobs=5),
]


class _Watched:
    """A runner whose launches may not wait."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.asynchronous, self.page_tokens = runner.asynchronous, runner.page_tokens

    def launch(self, batch: StepBatch) -> PendingStep:
        with no_waits():
            return self.runner.launch(batch)


@contextmanager
def no_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def requests() -> list[Request]:
    return [Request([(7 * i + 31 * n) % 40_000 for i in range(60)], sampling) for n, sampling in enumerate(SAMPLING)]


PROMPTS = [(number, 60) for number in range(len(SAMPLING))]
ANSWERS = [(number, 1) for number in range(len(SAMPLING))]
SCHEDULES = {
    "prompts, then answers": [PROMPTS, *[ANSWERS] * (NEW - 1)],
    "prompts beside answers": [PROMPTS[:2], *[ANSWERS[:2]] * 3, [*ANSWERS[:2], *PROMPTS[2:]], *[ANSWERS] * 4],
}


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_no_launch_waits(model_folder: Path, schedule: list[list[tuple[int, int]]], *, graphs: bool) -> None:
    config = EngineConfig.of(
        model_folder, device="cuda", dtype="bfloat16", kv_cache_bytes=1 << 28, max_batch_requests=4, cuda_graphs=graphs
    )
    runner = ModelRunner.load(config)
    if not runner.stepper.asynchronous:
        pytest.skip("steps of this engine wait")
    launch_ahead(runner, requests(), schedule)  # first-use allocations may wait
    asked = requests()
    launch_ahead(_Watched(runner), asked, schedule)  # type: ignore[arg-type]
    assert all(request.answer for request in asked)


def test_a_wait_would_be_seen() -> None:
    """The check detects a wait; otherwise the test above could not fail."""
    with pytest.raises(RuntimeError), no_waits():
        torch.ones(1, device="cuda").item()
